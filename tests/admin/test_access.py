"""Every page of the console is asked for by nobody, by somebody without a grant, by another tenant, and rightly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client
from django.urls import URLPattern, URLResolver
from django.utils import timezone
from django_celery_beat.models import PeriodicTask

from deadletters.models import DeadLetter, WorkerNode
from deadletters.services import HoldTarget, place_hold
from grants.actions import Action
from grants.models import AuditEvent, ScopeUserGrant, Verdict
from grants.services import create_token
from opsconsole.console.site import site
from repairs.reconciliation.running import run_scheduled
from repairs.redrives.requests import RedriveSelection
from repairs.redrives.services import create_redrive
from repairs.services import retry_letter
from tests.admin.conftest import SignIn
from tests.admin.tools import text_of
from tests.cast import Cast, give
from tests.factories import dead_letter, seconds
from tests.jobs.rows import job

pytestmark = pytest.mark.django_db

MISSING = "01890000-0000-7000-8000-000000000000"


@dataclass(frozen=True, kw_only=True)
class World:
    """One row of each kind, all of tenant ``default``."""

    letter: DeadLetter
    sent: DeadLetter
    occurrence: str
    repair: str
    event: str
    grant: str
    token: str
    node: str
    job: str
    run: str
    entry: int
    redrive: str
    hold: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """How a page answers: ``nobody`` and ``other`` are the statuses for no grant and for another tenant's.

    ``needs`` is what the one who may open it is given beside ``inspect``.
    """

    path: Callable[[World], str]
    nobody: int
    other: int
    needs: tuple[Action, ...] = ()
    right: int = 200
    missing: Callable[[World], str] | None = None
    is_public: bool = False
    tenant: str = "default"


def of_one(slug: str, find: Callable[[World], Any]) -> Callable[..., Page]:
    """Return what makes the pages of one row, from what follows its address and what they take."""

    def page(suffix: str = "", needs: tuple[Action, ...] = ()) -> Page:
        return Page(
            path=lambda world: f"/ops/{slug}/{find(world)}/{suffix}",
            missing=lambda _: f"/ops/{slug}/{MISSING}/{suffix}",
            nobody=404,
            other=404,
            needs=needs,
        )

    return page


of_incident = of_one("incidents", lambda world: world.letter.incident_id)
of_letter = of_one("dead-letters", lambda world: world.letter.id)
of_job = of_one("jobs", lambda world: world.job)
of_redrive = of_one("redrives", lambda world: world.redrive)
of_hold = of_one("holds", lambda world: world.hold)


def a_list(slug: str, *needs: Action) -> Page:
    return Page(path=lambda _: f"/ops/{slug}/", nobody=403, other=403 if needs else 200, needs=needs)


def for_everyone(path: str) -> Page:
    return Page(path=lambda _: path, nobody=200, other=200)


RETRY = (Action.DEAD_LETTERS_RETRY,)
SWEEP = (Action.RECONCILIATION_RUN,)
CLOSE = (Action.INCIDENTS_RESOLVE, Action.INCIDENTS_CLOSE_UNREPAIRED)

PAGES: dict[str, Page] = {
    "index": for_everyone("/ops/"),
    "live_overview": Page(path=lambda _: "/ops/live/overview/", nobody=403, other=200),
    "login": Page(path=lambda _: "/ops/login/", nobody=302, other=302, right=302, is_public=True),
    "logout": for_everyone("/ops/logout/"),
    "password_change": for_everyone("/ops/password_change/"),
    "password_change_done": for_everyone("/ops/password_change/done/"),
    "ops_incidents_incident_changelist": a_list("incidents"),
    "ops_incidents_incident_newer": Page(path=lambda _: "/ops/incidents/newer/?since=1", nobody=403, other=200),
    "ops_incidents_incident_page": of_incident(),
    "ops_incidents_incident_take": of_incident("take/", (Action.INCIDENTS_ACKNOWLEDGE,)),
    "ops_incidents_incident_release": of_incident("release/", (Action.INCIDENTS_ACKNOWLEDGE,)),
    "ops_incidents_incident_close": of_incident("close/", CLOSE),
    "ops_incidents_incident_retry_one": of_incident("retry-one/", RETRY),
    "ops_incidents_incident_retry_all": of_incident("retry/", RETRY),
    "ops_deadletters_deadletter_changelist": a_list("dead-letters"),
    "ops_deadletters_deadletter_newer": Page(path=lambda _: "/ops/dead-letters/newer/?since=1", nobody=403, other=200),
    "ops_deadletters_deadletter_page": of_letter(),
    "ops_deadletters_deadletter_traceback": Page(
        path=lambda world: f"/ops/dead-letters/{world.letter.id}/traceback/{world.occurrence}/",
        missing=lambda world: f"/ops/dead-letters/{MISSING}/traceback/{world.occurrence}/",
        nobody=404,
        other=404,
    ),
    "ops_deadletters_deadletter_retry": of_letter("retry/", RETRY),
    "ops_deadletters_deadletter_done": of_letter("done/", RETRY),
    "ops_deadletters_deadletter_discard": of_letter("discard/", (Action.DEAD_LETTERS_DISCARD,)),
    "ops_deadletters_deadletter_payload": of_letter("payload/", (Action.PAYLOADS_READ,)),
    "ops_deadletters_workernode_changelist": a_list("workers"),
    "ops_deadletters_workernode_page": Page(path=lambda world: f"/ops/workers/{world.node}/", nobody=403, other=200),
    "django_celery_beat_periodictask_changelist": a_list("schedule"),
    # What touches every tenant needs a grant for every tenant.
    "django_celery_beat_periodictask_page": Page(
        path=lambda world: f"/ops/schedule/{world.entry}/",
        missing=lambda _: "/ops/schedule/999999/",
        nobody=403,
        other=403,
        needs=SWEEP,
        tenant="*",
    ),
    "ops_repairs_reconciliationrun_changelist": a_list("sweeps"),
    "ops_repairs_reconciliationrun_page": Page(path=lambda world: f"/ops/sweeps/{world.run}/", nobody=403, other=200),
    "ops_repairs_reconciliationrun_run": Page(
        path=lambda _: "/ops/sweeps/run/", nobody=403, other=403, needs=SWEEP, tenant="*"
    ),
    "ops_repairs_repairaction_changelist": a_list("repairs"),
    "ops_repairs_repairaction_page": Page(
        path=lambda world: f"/ops/repairs/{world.repair}/",
        missing=lambda _: f"/ops/repairs/{MISSING}/",
        nobody=404,
        other=404,
    ),
    "ops_repairs_repairaction_cancel": Page(
        path=lambda world: f"/ops/repairs/{world.repair}/withdraw/",
        missing=lambda _: f"/ops/repairs/{MISSING}/withdraw/",
        nobody=404,
        other=404,
        needs=RETRY,
    ),
    "ops_deadletters_hold_changelist": a_list("holds"),
    "ops_deadletters_hold_place": Page(
        path=lambda _: "/ops/holds/place/", nobody=403, other=403, needs=(Action.DEAD_LETTERS_HOLD,)
    ),
    "ops_deadletters_hold_page": of_hold(),
    **{
        f"ops_deadletters_hold_{name}": of_hold(f"{name}/", (Action.DEAD_LETTERS_HOLD,))
        for name in ("extend", "end", "release")
    },
    "ops_repairs_redrive_changelist": a_list("redrives"),
    "ops_repairs_redrive_plan": Page(
        path=lambda _: "/ops/redrives/plan/", nobody=403, other=403, needs=(Action.REDRIVE_RUN,)
    ),
    "ops_repairs_redrive_page": of_redrive(),
    **{
        f"ops_repairs_redrive_{name.replace('-', '_')}": of_redrive(f"{name}/", (Action.REDRIVE_RUN,))
        for name in ("approve", "start", "pause", "resume", "cancel", "retry-failed")
    },
    "ops_jobs_job_changelist": a_list("jobs"),
    "ops_jobs_job_page": of_job(),
    "ops_jobs_job_payload": of_job("payload/", (Action.PAYLOADS_READ,)),
    "ops_grants_auditevent_changelist": a_list("audit", Action.AUDIT_READ),
    "ops_grants_auditevent_csv": Page(
        path=lambda _: "/ops/audit/csv/", nobody=403, other=403, needs=(Action.AUDIT_READ,)
    ),
    "ops_grants_auditevent_page": Page(
        path=lambda world: f"/ops/audit/{world.event}/",
        missing=lambda _: f"/ops/audit/{MISSING}/",
        nobody=404,
        other=404,
        needs=(Action.AUDIT_READ,),
    ),
    "ops_grants_scopeusergrant_changelist": for_everyone("/ops/permissions/"),
    "ops_grants_scopeusergrant_give": Page(
        path=lambda _: "/ops/permissions/give/", nobody=403, other=403, needs=(Action.GRANTS_MANAGE,)
    ),
    "ops_grants_scopeusergrant_explain": for_everyone("/ops/permissions/explain/"),
    "ops_grants_scopeusergrant_revoke": Page(
        path=lambda world: f"/ops/permissions/{world.grant}/take-back/",
        missing=lambda _: "/ops/permissions/user-grant:999999/take-back/",
        nobody=404,
        other=404,
        needs=(Action.GRANTS_MANAGE,),
    ),
    "ops_grants_apitoken_changelist": for_everyone("/ops/tokens/"),
    "ops_grants_apitoken_create": for_everyone("/ops/tokens/new/"),
    # Somebody else's token is not there; revoking one's own is in test_permissions.
    "ops_grants_apitoken_revoke": Page(
        path=lambda world: f"/ops/tokens/{world.token}/revoke/",
        missing=lambda _: f"/ops/tokens/{MISSING}/revoke/",
        nobody=404,
        other=404,
        right=404,
    ),
}


def patterns(urls: list[Any]) -> Iterator[URLPattern]:
    for one in urls:
        if isinstance(one, URLResolver):
            yield from patterns(one.url_patterns)
        else:
            yield one


def test_every_address_of_the_console_has_an_entry() -> None:
    named = {pattern.name for pattern in patterns(site.get_urls()) if pattern.name is not None}
    assert named == set(PAGES)


@pytest.fixture
def world(cast: Cast) -> World:
    letter = dead_letter()
    sent = dead_letter()
    done = retry_letter(letter_id=sent.id, by=cast.ada, key="world")
    event = AuditEvent.objects.filter(tenant="default", target_type="dead_letter").first()
    assert event is not None
    grant = ScopeUserGrant.objects.filter(user_id=cast.olga.user_id).first()
    now = timezone.now()
    token = create_token(
        by=cast.ada, name="nightly", actions=[Action.INSPECT], tenant="*", expires_at=now + seconds(99), key="token"
    )
    WorkerNode.objects.create(id="w1", source="tests", host="h1", pid=1, started_at=now, seen_at=now)
    planned = create_redrive(by=cast.ada, key="redrive", selection=RedriveSelection(letter_ids=(dead_letter().id,)))
    held = place_hold(
        target=HoldTarget(tenant="default", job_type="shop.held"), reason="world", by=cast.ada, key="hold",
        ends_at=now + seconds(600),
    )  # fmt: skip
    swept = run_scheduled("retention")
    assert swept is not None
    return World(
        letter=letter,
        sent=sent,
        occurrence=str(letter.occurrences.get().id),
        repair=str(done.repair_id),
        event=str(event.id),
        grant=str(grant),
        token=token.public_id,
        node="w1",
        job=str(job().id),
        run=str(swept.id),
        hold=str(held.hold_id),
        redrive=str(planned.redrive_id),
        entry=PeriodicTask.objects.get(name="opsconsole: stale leases").pk,
    )


def answers(client: Client, world: World) -> dict[str, Any]:
    return {name: client.get(page.path(world)) for name, page in PAGES.items()}


def statuses(found: dict[str, Any]) -> dict[str, int]:
    return {name: answer.status_code for name, answer in found.items()}


def denials(name: str) -> set[tuple[str, str]]:
    rows = AuditEvent.objects.filter(operator_name=name, verdict=Verdict.DENIED)
    return set(rows.values_list("action", "target_type"))


def test_who_is_not_signed_in_is_sent_to_the_login_page(world: World) -> None:
    """B2: and nothing is audited."""
    before = AuditEvent.objects.count()
    found = answers(Client(), world)
    assert statuses(found) == {name: 200 if page.is_public else 302 for name, page in PAGES.items()}
    # Whoever logs out twice comes to the front page, and from there to the login page.
    where = {name: answer["Location"].split("?")[0] for name, answer in found.items() if answer.status_code == 302}
    assert where == {name: "/ops/" if name == "logout" else "/ops/login/" for name in where}
    assert AuditEvent.objects.count() == before


def test_who_holds_no_grant_sees_nothing(world: World, cast: Cast, sign_in: SignIn) -> None:
    """GRA-01, B2: and each refusal is audited."""
    found = answers(sign_in(cast.nobody), world)
    assert statuses(found) == {name: page.nobody for name, page in PAGES.items()}
    assert denials("nobody") >= {
        ("inspect", "page"), ("audit.read", "page"), ("grants.manage", "page"), ("grants.manage", "grant"),
        ("inspect", "incident"), ("inspect", "dead_letter"), ("inspect", "repair_action"),
        ("audit.read", "audit_event"),
    }  # fmt: skip


def test_a_grant_for_another_tenant_shows_nothing(world: World, cast: Cast, sign_in: SignIn) -> None:
    """GRA-02: 404, the same bytes as for what is not there, and audited."""
    client = sign_in(cast.bram)
    found = answers(client, world)
    assert statuses(found) == {name: page.other for name, page in PAGES.items()}
    for name, answer in found.items():
        text = "" if answer.status_code == 302 else text_of(answer.content.decode())
        assert "shop.send_mail" not in text or "workernode" in name, name
        assert str(world.letter.id) not in text, name
    for name, page in PAGES.items():
        if page.missing is not None:
            assert found[name].content == client.get(page.missing(world)).content, name
    assert denials("bram") >= {("inspect", kind) for kind in ("incident", "dead_letter", "repair_action")}


def test_the_right_grant_opens_it(world: World, cast: Cast, sign_in: SignIn) -> None:
    """Each page with its own grants and no other."""
    found = {}
    for name, page in PAGES.items():
        ScopeUserGrant.objects.filter(user_id=cast.nobody.user_id).delete()
        give(cast.nobody, Action.INSPECT, *page.needs, tenant=page.tenant)
        found[name] = sign_in(cast.nobody).get(page.path(world)).status_code
    assert found == {name: page.right for name, page in PAGES.items()}


@pytest.mark.parametrize("method", ["get", "post"])
def test_who_may_read_it_but_not_do_it_is_refused_and_told_which_grant_is_missing(
    method: str, world: World, cast: Cast, sign_in: SignIn
) -> None:
    """ADM-01, STYLE 6: 403 for what one may see but not do; nothing changes, and it is audited."""
    before = _state(world)
    client = sign_in(cast.vera)
    values = {"idempotency_key": "k", "version": "1", "standing": "", "letter": str(world.letter.id), "reason": "r"}
    values |= {"code": "loss_accepted", "summary": "by hand", "unrepaired": "2", "run": str(world.letter.id)}
    for name, page in PAGES.items():
        if page.needs and page.missing and "_grants_" not in name:
            answer = getattr(client, method)(page.path(world), values if method == "post" else None)
            assert answer.status_code == 403, name
            assert page.needs[0].value in text_of(answer.content.decode()), name
            assert page.needs[0].value in {action for action, _ in denials("vera")}, name
    assert _state(world) == before


def _state(world: World) -> list[Any]:
    rows = DeadLetter.objects.select_related("incident").order_by("id")
    return [(row.state, row.incident.state, row.incident.version, row.repairs.count()) for row in rows]


def test_a_superuser_has_no_bypass(world: World, cast: Cast, sign_in: SignIn, django_user_model: Any) -> None:
    django_user_model.objects.filter(pk=cast.nobody.user_id).update(is_superuser=True)
    client = sign_in(cast.nobody)
    assert client.get("/ops/incidents/").status_code == 403
    assert client.get(f"/ops/incidents/{world.letter.incident_id}/").status_code == 404


@pytest.mark.parametrize("missing", ["is_staff", "is_active"])
def test_only_active_staff_may_sign_in(missing: str, cast: Cast, django_user_model: Any) -> None:
    django_user_model.objects.filter(pk=cast.ada.user_id).update(**{missing: False})
    client = Client()
    client.post("/ops/login/", {"username": "ada", "password": "pw", "next": "/ops/"})
    assert client.get("/ops/").status_code == 302


def test_the_menu_holds_only_what_can_be_opened(cast: Cast, sign_in: SignIn) -> None:
    entries = {
        "Incidents", "Failed jobs", "Job ledger", "Repairs", "Redrives", "Holds", "Sweeps", "Schedule", "Workers",
        "Audit", "Permissions", "API tokens",
    }  # fmt: skip
    seen = {
        name: {entry["label"] for entry in sign_in(operator).get("/ops/").context["menu"]}
        for name, operator in (("ada", cast.ada), ("vera", cast.vera), ("nobody", cast.nobody))
    }
    assert seen == {
        "ada": entries,
        "vera": entries - {"Audit"},
        "nobody": {"Permissions", "API tokens"},
    }


def test_a_model_permission_of_django_opens_nothing(world: World, cast: Cast, sign_in: SignIn) -> None:
    """GRA-01."""
    user = get_user_model().objects.get(pk=cast.nobody.user_id)
    user.user_permissions.set(Permission.objects.all())
    client = sign_in(cast.nobody)
    assert client.get("/ops/dead-letters/").status_code == 403
    assert client.get(f"/ops/dead-letters/{world.letter.id}/retry/").status_code == 404
