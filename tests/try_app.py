import os
from opsconsole.celery import app
@app.task(name="try.boom")
def boom(i):
    if not os.path.exists("/tmp/try/heal"): raise ValueError(f"boom {i}")
@app.task(name="try.ok")
def ok(i): return None
