"""A project that attaches the console keeps everything that was its own: admin, settings, Celery application."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.attach.shop import Shop

LOOK_AT_ADMIN = """
import re
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.test import Client
from shop.models import Order
people = get_user_model().objects
boss = people.filter(email="boss@shop.example").first() or people.create_superuser("boss@shop.example", "password")
order = Order.objects.first() or Order.objects.create(customer=boss, total=7)
client = Client()
answer = {"models": sorted(model._meta.label for model in admin.site._registry)}
answer["sent to log in"] = client.get("/admin/").headers["Location"]
signed_in = client.post("/admin/login/?next=/admin/", {"username": "boss@shop.example", "password": "password"})
answer["signed in"] = [signed_in.status_code, signed_in.headers["Location"]]
for path in ("/", "/admin/", "/admin/shop/order/", f"/admin/shop/order/{order.pk}/change/", "/admin/shop/person/add/"):
    page = client.get(path)
    text = re.sub(r'csrfmiddlewaretoken" value="[^"]+', "", page.content.decode()).replace(str(boss.pk), "PERSON")
    answer[path] = [page.status_code, text, sorted(set(page.headers) - {"Expires"})]
saved = client.post(f"/admin/shop/order/{order.pk}/change/", {"customer": str(boss.pk), "total": "8"})
answer["saved"] = [saved.status_code, Order.objects.get(pk=order.pk).total]
"""


def test_checks_have_nothing_to_say(attached: Shop) -> None:
    attached.run("check", "--fail-level", "WARNING")


def test_no_migration_is_missing_for_a_user_model_of_the_projects_own(attached: Shop) -> None:
    attached.run("makemigrations", "--check", "--dry-run")


def test_the_projects_admin_is_the_same_page_for_page(plain: Shop, attached: Shop) -> None:
    before: dict[str, Any] = plain.evaluate(LOOK_AT_ADMIN)
    after: dict[str, Any] = attached.evaluate(LOOK_AT_ADMIN)
    assert before["models"] == ["auth.Group", "shop.Order", "shop.Person"]
    assert before["saved"] == [302, 8]
    for what in before:
        assert after[what] == before[what], what
    assert "Content-Security-Policy" not in json.dumps(after)


DESCRIBE = """
from shop.celery import app
from shop.describe import describe
answer = describe(app)
"""


def test_the_celery_application_is_the_same(plain: Shop, attached: Shop) -> None:
    """Capture changes no setting, no class and no task; the console's own tasks stand beside the project's."""
    before, after = plain.evaluate(DESCRIBE), attached.evaluate(DESCRIBE)
    assert len(before["settings"]) > 100
    assert "shop.tasks.Report" in before["tasks"]
    folders = (str(plain.folder), str(attached.folder))
    assert json.loads(json.dumps(after).replace(folders[1], folders[0])) == before
    ours = set(
        attached.evaluate("from shop.celery import app\napp.loader.import_default_modules()\nanswer = list(app.tasks)")
    )
    assert {"opsconsole.reconcile", "opsconsole.jobs.route_report"} <= ours


def test_the_console_stands_beside_it_with_its_own_policy(attached: Shop) -> None:
    answer = attached.evaluate(
        "from django.test import Client\n"
        "pages = {path: Client().get(path) for path in ('/ops/', '/ops/login/', '/console-api/v1/incidents')}\n"
        "policy = 'Content-Security-Policy'\n"
        "answer = {path: [page.status_code, page.headers.get(policy, '')] for path, page in pages.items()}\n"
    )
    assert answer["/ops/"][0] == 302
    assert "default-src 'none'" in answer["/ops/login/"][1]
    assert answer["/console-api/v1/incidents"][0] == 401


BOOTSTRAP_AND_READ = """
from django.contrib.auth import get_user_model
from django.test import Client
from django.core.management import call_command
person = get_user_model().objects.create_user("ada@shop.example", "a-long-password", is_staff=True)
call_command("grants", "bootstrap", "ada@shop.example", verbosity=0)
client = Client()
client.force_login(person)
answer = {path: client.get(path).status_code for path in ("/ops/", "/ops/incidents/", "/console-api/v1/incidents")}
answer["user"] = client.get("/admin/").status_code
"""


def test_a_person_of_the_projects_own_user_model_can_be_an_operator(attached: Shop) -> None:
    assert set(attached.evaluate(BOOTSTRAP_AND_READ).values()) == {200}


@pytest.mark.parametrize("command", ["up", "demo"])
def test_the_commands_of_the_consoles_own_project_say_that_they_are_not_for_others(
    attached: Shop, command: str
) -> None:
    done = attached.run(command, *(["status"] if command == "demo" else []), check=False)
    assert done.returncode == 1
    assert "has web and workers of its own" in done.stderr


TABLES = "SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name"
OUR_APPS = ("ops_repairs", "ops_deadletters", "ops_jobs", "ops_incidents", "ops_grants", "knox", "guardian")


UNINSTALL = """
from django.core.management import call_command
for label in values["labels"]:
    call_command("migrate", label, "zero", verbosity=0)
answer = True
"""


def test_uninstalling_leaves_the_database_as_it_was(plain: Shop, attached: Shop, tmp_path: Path) -> None:
    shop = Shop(tmp_path / "shop", is_attached=True)
    shutil.copy(attached.folder / "migrated.sqlite3", shop.database)
    assert len(shop.query(TABLES)) > len(plain.query(TABLES)) + 20
    shop.evaluate(UNINSTALL, labels=OUR_APPS)
    assert shop.query(TABLES) == plain.query(TABLES)
