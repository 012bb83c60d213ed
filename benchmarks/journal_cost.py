"""What the journal costs for each job that succeeds: processor time in the hooks and in the reader, bytes on disk.

    python -m benchmarks.journal_cost

Runs the hooks of one delivery (received, acknowledged, started, ended) on Celery's own objects in one process; no
broker and no database.
"""

from __future__ import annotations

import time

from benchmarks.common import Goal, benchmark, median, show
from benchmarks.hosting import make_app, make_hooks, make_request, running
from deadletters.journal.reader import FolderReader
from opsconsole.core.sealing import Sealer, derive_key


def main() -> None:
    with benchmark("journal_cost", "The journal of jobs that succeed.", needs=(), tasks=20_000, rounds=3) as run:
        app = make_app()
        sealer = Sealer({"bench": derive_key("bench", "bench")}, "bench")
        main_cpu, child_cpu, reader_cpu, size = [], [], [], []
        for number in range(run.rounds):
            hooks = make_hooks(app, run.folder / str(number), sealer, "bench")
            in_main = in_child = 0.0
            for job in range(run.tasks):
                request = make_request(app, "bench.noop", job)
                begin = time.process_time()
                hooks._on_task_received(request=request)
                request.message.ack()
                in_main += time.process_time() - begin
                with running(request) as task:
                    begin = time.process_time()
                    hooks._on_task_prerun(sender=task)
                    hooks._on_task_postrun(sender=task, state="SUCCESS", retval=None)
                    in_child += time.process_time() - begin
            hooks.flush()
            assert hooks.folder is not None
            main_cpu.append(in_main / run.tasks)
            child_cpu.append(in_child / run.tasks)
            size.append(hooks.folder.size() / run.tasks)
            reader_cpu.append(_read(hooks.folder, sealer, run.tasks) / run.tasks)
            hooks.close()
        show(
            run,
            head=("part", "per job"),
            rows=[
                ("hooks in the main process, ms", 1e3 * median(main_cpu)),
                ("hooks in the child, ms", 1e3 * median(child_cpu)),
                ("reader, ms", 1e3 * median(reader_cpu)),
                ("disk, bytes", median(size)),
            ],
            goals=[Goal(what="journal of a job", value=median(size), bound=1024, at_least=False, unit=" bytes")],
        )


def _read(folder: object, sealer: Sealer, jobs: int) -> float:
    """Read a whole journal and return the processor time that it took."""
    reader = FolderReader(folder, sealer, settle_seconds=0)  # type: ignore[arg-type]
    begin = time.process_time()
    events = 0
    while True:
        batch = reader.read()
        events += len(batch.events)
        if batch.exhausted:
            break
    if events != jobs:
        raise AssertionError(f"{events} events of {jobs} jobs; {batch.damaged[:1]}")
    return time.process_time() - begin


if __name__ == "__main__":
    main()
