"""Recording again what journals have kept: after a lost commit, or once the cause of a set-aside entry is mended.

Recording is idempotent by delivery, so a replay adds what is missing and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice

from django.db import InterfaceError, OperationalError, transaction

from deadletters import conf
from deadletters.drainer import open_failed, policies
from deadletters.intake import HostClock, Intake, open_message, seal_message
from deadletters.journal.events import Failed
from deadletters.journal.kept import KeptFailures
from deadletters.models import SealedMessage, SetAsideEntry
from deadletters.recording import Settlement, record_page
from opsconsole.core.clock import boot_id, boot_now, wall_now
from opsconsole.core.database import database_now, locked
from opsconsole.core.sealing import SealError

PAGE = 100


@dataclass(slots=True, kw_only=True)
class Replayed:
    """What a replay did: deliveries looked at, occurrences that were missing, and why some could not be recorded."""

    seen: int = 0
    recorded: int = 0
    refused: list[str] = field(default_factory=list)


def replay_kept(kept: KeptFailures, settlement: Settlement) -> Replayed:
    """Record every failure that was kept on this host and that the database does not have."""
    report = Replayed()
    for source, failures in groupby(kept.iter(), key=lambda failed: failed.delivery.source):
        for page in _pages(failures):
            report.seen += len(page)
            try:
                report.recorded += _record(page, source or conf.source(), settlement)
            except (OperationalError, InterfaceError):
                raise
            except Exception:  # noqa: BLE001  (one of them is bad; the others are to be recorded)
                _one_by_one(page, source or conf.source(), settlement, report)
    return report


def replay_set_aside(settlement: Settlement) -> Replayed:
    """Record every entry that was set aside; those that still cannot be recorded stay, with the reason."""
    report = Replayed()
    for entry in SetAsideEntry.objects.filter(applied_at__isnull=True).order_by("set_aside_at", "id"):
        report.seen += 1
        try:
            report.recorded += _record([open_failed(bytes(entry.blob))], entry.source, settlement)
        except (OperationalError, InterfaceError):
            raise
        except Exception as error:  # noqa: BLE001  (whatever is wrong with one entry, the next ones are to be tried)
            report.refused.append(f"{entry.job_type} {entry.delivery}: {type(error).__name__}: {error}")
            continue
        SetAsideEntry.objects.filter(id=entry.id).update(applied_at=database_now())
    return report


def _one_by_one(page: list[Failed], source: str, settlement: Settlement, report: Replayed) -> None:
    for failed in page:
        try:
            report.recorded += _record([failed], source, settlement)
        except (OperationalError, InterfaceError):
            raise
        except Exception as error:  # noqa: BLE001  (as above)
            report.refused.append(f"{failed.delivery.task} {failed.delivery.task_id}: {type(error).__name__}: {error}")


def _record(page: list[Failed], source: str, settlement: Settlement) -> int:
    now = database_now()
    clock = HostClock(database_now=now, boot_now=boot_now(), wall_now=wall_now(), boot_id=boot_id())
    for failed in page:
        failed.delivery.source = source
    page = [failed for failed in page if not (failed.delivery.repair_id and settlement.is_settled_elsewhere(failed))]
    book = policies().book()

    def intake_of(failed: Failed) -> tuple[Intake, str]:
        intake = Intake(
            source=source,
            worker=failed.delivery.worker,
            release=conf.release(),
            sealer=conf.sealer(),
            redactor=conf.redactor(),
            policies=book,
            mode=conf.grouping_mode(),
        )
        return intake, failed.delivery.boot_id

    recorded = record_page(page, intake_of=intake_of, clock=clock, settlement=settlement)
    return sum(item.is_new_occurrence for item in recorded)


def _pages(failures: Iterable[Failed]) -> Iterator[list[Failed]]:
    iterator = iter(failures)
    while page := list(islice(iterator, PAGE)):
        yield page


@dataclass(slots=True, kw_only=True)
class Rotated:
    """What a key rotation did: messages sealed anew, and those whose key is not configured any more."""

    sealed_anew: int = 0
    unknown: int = 0


def rotate_messages() -> Rotated:
    """Seal every stored message that has an old key with the primary one, in pages by key.

    Safe to stop and to run again. A message whose key is missing stays as it is and is counted.
    """
    sealer = conf.sealer()
    report = Rotated()
    last = None
    while True:
        with transaction.atomic():
            rows = SealedMessage.objects.exclude(key_id=sealer.primary).order_by("letter_id")
            if last is not None:
                rows = rows.filter(letter_id__gt=last)
            page = list(locked(rows)[:PAGE])
            if not page:
                return report
            for row in page:
                last = row.letter_id
                try:
                    plain = open_message(sealer, bytes(row.blob), row.letter_id)
                except SealError:
                    report.unknown += 1
                    continue
                row.blob = seal_message(sealer, plain, row.letter_id)
                row.key_id = sealer.primary
                row.save(update_fields=["blob", "key_id"])
                report.sealed_anew += 1
