"""Holds in the console: placed, watched, moved, ended, and what they put aside sent on."""

from __future__ import annotations

from datetime import timedelta

import pytest

from deadletters.models import Hold, HoldState
from deadletters.services import end_hold
from grants.actions import Action
from grants.models import AuditEvent
from grants.resources import ANY
from opsconsole.core.database import database_now
from repairs.models import Redrive, RedriveState
from tests.admin.conftest import SignIn
from tests.admin.tools import confirm, hidden_fields, text_of
from tests.api.situations import held_letter, placed_hold
from tests.cast import Cast, give
from tests.factories import dead_letter

pytestmark = pytest.mark.django_db(transaction=True)

PLACE = "/ops/holds/place/"
TASK = {
    "tenant": "default",
    "source": "*",
    "job_type": "shop.send_mail",
    "ends_in": "3600",
    "reason": "it is broken",
}
PACE = {"canary_size": "1", "rate_per_second": "20", "max_outstanding": "100", "stop_percent": "10"}


def test_a_task_is_held_with_a_reason_and_an_end(cast: Cast, sign_in: SignIn) -> None:
    client = sign_in(cast.ada)
    assert "Hold…" in text_of(client.get("/ops/holds/").content.decode())
    unsaid = confirm(client, PLACE, {**TASK, "reason": ""})
    assert unsaid.status_code == 400
    answer = confirm(client, PLACE, TASK, follow=True)
    hold = Hold.objects.get()
    assert answer.redirect_chain == [(f"/ops/holds/{hold.id}/", 302)]
    text = text_of(answer.content.decode())
    assert "Hold of task shop.send_mail, tenant default" in text
    assert "Placed by ada" in text
    assert "it is broken" in text
    assert abs(hold.ends_at - database_now() - timedelta(hours=1)) < timedelta(minutes=1)
    assert AuditEvent.objects.get(action="holds.placed").operator_name == "ada"


def test_a_form_that_is_sent_twice_places_one_hold(cast: Cast, sign_in: SignIn) -> None:
    """A9: the end is counted from when the form was shown, so that both name the same one."""
    client = sign_in(cast.ada)
    seen = hidden_fields(client.get(PLACE).content.decode())
    first, second = (client.post(PLACE, {**seen, **TASK}, follow=True) for _ in range(2))
    assert Hold.objects.count() == 1
    assert first.redirect_chain == second.redirect_chain
    assert "that was done before, and nothing was repeated" in text_of(second.content.decode())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"job_type": ""}, "Name a task, a queue or a task id."),
        ({"payload_hash": "ab"}, "A payload is named by the 64 digits of its hash"),
    ],
)
def test_what_cannot_be_held_is_told_and_the_form_comes_back(
    fields: dict[str, str], told: str, cast: Cast, sign_in: SignIn
) -> None:
    answer = confirm(sign_in(cast.ada), PLACE, {**TASK, **fields})
    assert answer.status_code == 400
    assert told in text_of(answer.content.decode())
    assert not Hold.objects.exists()


def test_holding_everywhere_takes_a_grant_everywhere(cast: Cast, sign_in: SignIn) -> None:
    """B2: and the refusal is audited."""
    give(cast.nobody, Action.INSPECT, Action.DEAD_LETTERS_HOLD, tenant="default")
    client = sign_in(cast.nobody)
    assert confirm(client, PLACE, {**TASK, "tenant": ANY}).status_code == 403
    assert not Hold.objects.exists()
    assert AuditEvent.objects.filter(operator_name="nobody", action="dead-letters.hold", verdict="denied").exists()
    assert confirm(client, PLACE, TASK).status_code == 302


def test_jobs_like_a_failed_one_are_filled_in(cast: Cast, sign_in: SignIn) -> None:
    letter = dead_letter()
    page = sign_in(cast.ada).get(f"{PLACE}?like={letter.id}").content.decode()
    assert 'value="shop.send_mail"' in page
    give(cast.nobody, Action.INSPECT, Action.DEAD_LETTERS_HOLD, tenant="t-b")
    assert sign_in(cast.nobody).get(f"{PLACE}?like={letter.id}").status_code == 404


def test_who_may_only_look_is_told_which_grant_is_missing(cast: Cast, sign_in: SignIn) -> None:
    """ADM-01."""
    hold = Hold.objects.get(id=placed_hold(cast.ada))
    client = sign_in(cast.vera)
    assert "needs the permission dead-letters.hold" in text_of(client.get(f"/ops/holds/{hold.id}/").content.decode())
    assert "Hold…" not in text_of(client.get("/ops/holds/").content.decode())


def test_its_end_is_moved_and_it_is_ended(cast: Cast, sign_in: SignIn) -> None:
    hold = Hold.objects.get(id=placed_hold(cast.ada))
    client = sign_in(cast.ada)
    confirm(client, f"/ops/holds/{hold.id}/extend/", {"ends_in": "86400", "reason": "still broken"})
    hold.refresh_from_db()
    assert abs(hold.ends_at - database_now() - timedelta(days=1)) < timedelta(minutes=1)
    confirm(client, f"/ops/holds/{hold.id}/end/", {"reason": "mended"})
    hold.refresh_from_db()
    assert (hold.state, hold.ended_by_name) == (HoldState.ENDED, "ada")
    late = client.get(f"/ops/holds/{hold.id}/end/").content.decode()
    assert "It holds no more: ended" in text_of(late)


def test_what_it_has_put_aside_is_sent_on_as_a_redrive(cast: Cast, sign_in: SignIn) -> None:
    """C14."""
    letter = held_letter(placed_hold(cast.ada))
    hold = Hold.objects.get()
    client = sign_in(cast.ada)
    page = text_of(client.get(f"/ops/holds/{hold.id}/").content.decode())
    assert "Send on 1…" in page
    assert "Still aside 1" in page
    end_hold(hold_id=hold.id, reason="mended", by=cast.ada, key="end")
    answer = confirm(client, f"/ops/holds/{hold.id}/release/", PACE, follow=True)
    redrive = Redrive.objects.get()
    assert answer.redirect_chain == [(f"/ops/redrives/{redrive.id}/", 302)]
    assert (redrive.state, redrive.letter_state, redrive.total_count) == (RedriveState.READY, "held", 1)
    letter.refresh_from_db()
    assert letter.state == "held", "nothing is sent before it is started"
    assert "Sent on as a redrive" in text_of(client.get(f"/ops/holds/{hold.id}/").content.decode())


def test_who_may_hold_sends_on_what_was_put_aside_without_another_grant(cast: Cast, sign_in: SignIn) -> None:
    """The redrive of a release is decided about, and runs, by what the release took."""
    held_letter(placed_hold(cast.ada))
    hold = Hold.objects.get()
    give(cast.olga, Action.DEAD_LETTERS_HOLD, tenant="default")
    client = sign_in(cast.olga)
    confirm(client, f"/ops/holds/{hold.id}/release/", PACE)
    redrive = Redrive.objects.get()
    url = f"/ops/redrives/{redrive.id}/"
    assert "Start…" in text_of(client.get(url).content.decode())
    confirm(client, f"{url}start/", {})
    redrive.refresh_from_db()
    assert redrive.started_by == cast.olga.ref
    assert confirm(client, f"{url}pause/", {}).status_code == 302
    redrive.refresh_from_db()
    assert redrive.state == RedriveState.PAUSED
    give(cast.nobody, Action.INSPECT, Action.REDRIVE_RUN, tenant="default")
    other = sign_in(cast.nobody)
    assert "needs the permission dead-letters.hold" in text_of(other.get(url).content.decode())
    assert other.get(f"{url}resume/").status_code == 403


def test_pages_lead_to_a_hold_and_from_what_it_has_put_aside(cast: Cast, sign_in: SignIn) -> None:
    failed = dead_letter()
    held = held_letter(placed_hold(cast.ada))
    hold = Hold.objects.get()
    client = sign_in(cast.ada)
    incident = client.get(f"/ops/incidents/{failed.incident_id}/").content.decode()
    assert f"{PLACE}?tenant=default&amp;source=tests&amp;job_type=shop.send_mail" in incident
    assert f"{PLACE}?like={failed.id}" in client.get(f"/ops/dead-letters/{failed.id}/").content.decode()
    for page in (f"/ops/incidents/{held.incident_id}/", f"/ops/dead-letters/{held.id}/"):
        assert f'href="/ops/holds/{hold.id}/"' in client.get(page).content.decode()
    assert "Hold jobs" not in sign_in(cast.vera).get(f"/ops/incidents/{failed.incident_id}/").content.decode()


def test_the_incident_of_a_hold_speaks_of_jobs_on_hold_and_of_no_failure(cast: Cast, sign_in: SignIn) -> None:
    hold_id = placed_hold(cast.ada)
    letters = [held_letter(hold_id) for _ in range(2)]
    page = text_of(sign_in(cast.ada).get(f"/ops/incidents/{letters[0].incident_id}/").content.decode())
    assert "2 on hold Nothing has failed." in page
    assert "2 put aside" in page
    assert "first job put aside" in page
    assert "Put aside, not run" in page
    assert "final failure" not in page
    assert "more failure" not in page


def test_a_hold_of_every_tenant_shows_each_only_what_is_theirs(cast: Cast, sign_in: SignIn) -> None:
    hold_id = placed_hold(cast.ada, tenant=ANY)
    for tenant in ("default", "default", "t-b"):
        held_letter(hold_id, tenant=tenant)
    theirs = text_of(sign_in(cast.bram).get(f"/ops/holds/{hold_id}/").content.decode())
    assert "Still aside 1" in theirs
    assert "in all" not in theirs
    whole = text_of(sign_in(cast.ada).get(f"/ops/holds/{hold_id}/").content.decode())
    assert "Put aside 3 in all Still aside 3" in whole
