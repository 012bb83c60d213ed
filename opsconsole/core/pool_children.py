"""Lets the children of a worker's pool live as long as its main process, and no shorter.

Celery asks Linux to kill a child of the pool when its parent ends, and Linux takes that to be the thread that forked it
(prctl(2), PR_SET_PDEATHSIG). Where a broker has no event loop, which is so for one made of files, a thread of the pool
forks what replaces a child that died, and ends first of all when the worker is stopped. Within a second such a
replacement was then killed, in the middle of its job; and if it was just waiting for a job, with a lock in its hands
that the main process wanted afterwards, the worker hung for ever.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Any, Final

from billiard.util import set_pdeathsig  # type: ignore[attr-defined]  # the stubs lack it
from celery.signals import worker_process_init

_NEVER: Final = 0

_parent = 0
"""Who forked this process from another thread than its main one."""


def _note_forking_thread() -> None:
    global _parent
    is_main = threading.current_thread() is threading.main_thread()
    _parent = 0 if is_main else os.getpid()


def live_with_main_process(**_: Any) -> None:
    """Let this child of a pool end with its parent process instead of the thread that forked it.

    Where the system cannot tell of the end of a process (it is not Linux, or forbids it), Celery's way stays.
    """
    if not _parent or not hasattr(os, "pidfd_open"):
        return
    try:
        parent = os.pidfd_open(_parent)
    except OSError:
        return
    if os.getppid() != _parent:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=_end_with, args=(parent,), name="ends-with-main-process", daemon=True).start()
    set_pdeathsig(_NEVER)


def _end_with(parent: int) -> None:
    # Time limits are signals: each must interrupt the thread that runs the job.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    end = select.poll()
    end.register(parent, select.POLLIN)
    end.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def connect() -> None:
    """See to it in every pool that is started from here on."""
    worker_process_init.connect(live_with_main_process, weak=False, dispatch_uid="opsconsole.pool_children")


os.register_at_fork(before=_note_forking_thread)
