import os
import pytest
from django.conf import settings
from tests.factories import dead_letter, REFUSED, TIMED_OUT
from deadletters.models import WorkerNode
from django.utils import timezone
from tests.admin.tools import succeed, newest_repair, mark_sent
import json

pytestmark=[pytest.mark.browser, pytest.mark.urls("tests.admin.host_urls"), pytest.mark.django_db(transaction=True)]

def login(page):
    page.goto("/ops/login/")
    page.fill("input[name=username]", "ada"); page.fill("input[name=password]", "pw"); page.screenshot(path="/tmp/shots/00-login.png")
    page.click("button[type=submit]")

def test_shots(page, cast):
    page.set_viewport_size({"width":1360,"height":900})
    for i in range(6): l=dead_letter()
    for i in range(3): dead_letter(ambiguous=True, task="shop.send_mail")
    dead_letter(task="shop.other")
    now=timezone.now()
    WorkerNode.objects.create(id="w1.host", source="tests", host="host-1", pid=1, queues='["celery"]', tasks=json.dumps({"shop.send_mail":"(address, *, order)"}), started_at=now, seen_at=now, captured_at=now)
    login(page)
    page.screenshot(path="/tmp/shots/01-index.png", full_page=True)
    n=[1]
    def shot(name, url=None):
        if url: page.goto(url)
        n[0]+=1
        page.screenshot(path=f"/tmp/shots/{n[0]:02d}-{name}.png", full_page=True)
    shot("incidents","/ops/incidents/")
    inc=l.incident
    shot("incident", f"/ops/incidents/{inc.id}/")
    page.get_by_role("button", name="Take it").click(); shot("taken")
    page.get_by_role("link", name="Retry 1 first").click(); shot("retry-one")
    page.get_by_role("button", name="Retry this 1").click(); shot("sent")
    succeed(mark_sent(newest_repair()))
    page.reload(); shot("one-ok")
    page.get_by_role("link", name="Retry all").click(); shot("retry-all")
    page.go_back()
    page.click("summary.button"); page.get_by_role("link", name="Close without").click(); shot("close")
    from incidents.models import Incident
    other=Incident.objects.exclude(id=inc.id).order_by("number").first()
    shot("ambiguous", f"/ops/incidents/{other.id}/retry/")
    shot("letters", "/ops/dead-letters/")
    page.check("input[data-selects]"); page.get_by_role("button", name="Retry selected").click(); shot("bulk")
    shot("letter", f"/ops/dead-letters/{l.id}/")
    for u in ["repairs","audit","permissions","permissions/give","permissions/explain","tokens","tokens/new","workers","workers/w1.host","nothing"]:
        shot(u.replace("/","-"), f"/ops/{u}/")
    page.set_viewport_size({"width":390,"height":844})
    shot("phone-incidents","/ops/incidents/")
    shot("phone-incident", f"/ops/incidents/{inc.id}/")
