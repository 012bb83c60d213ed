"""Settings of a shop with its own user model, its own admin and ATOMIC_REQUESTS; SHOP_ATTACHED=1 adds the console.

Everything below "the console" is what docs/attach.md asks for, and nothing above it differs between the two.
"""

import os
from pathlib import Path

FOLDER = Path(os.environ["SHOP_FOLDER"])
SECRET_KEY = "the-secret-key-of-the-shop-that-is-only-used-in-tests"
DEBUG = False
ALLOWED_HOSTS = ["testserver", "localhost"]
USE_TZ = True
TIME_ZONE = "America/New_York"  # what the console calls UTC has to be UTC here too
ROOT_URLCONF = "shop.urls"
AUTH_USER_MODEL = "shop.Person"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
STATIC_URL = "static/"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "shop",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DATABASE", str(FOLDER / "shop.sqlite3")),
        "ATOMIC_REQUESTS": True,
        "OPTIONS": {"timeout": 20, "transaction_mode": "IMMEDIATE", "init_command": "PRAGMA journal_mode=WAL;"},
    }
}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

CELERY_BROKER_URL = os.environ.get("SHOP_BROKER_URL", "memory://")
CELERY_RESULT_BACKEND = f"file://{FOLDER / 'results'}"
CELERY_TASK_DEFAULT_QUEUE = os.environ.get("SHOP_QUEUE", "shop")
CELERY_TASK_ACKS_LATE = False
CELERY_WORKER_PREFETCH_MULTIPLIER = 2
CELERY_TASK_ROUTES = {"shop.tasks.*": {"priority": 3}}
CELERY_RESULT_EXTENDED = True

# -- the console -------------------------------------------------------------------------------------------------------
SHOP_ATTACHED = os.environ.get("SHOP_ATTACHED") == "1"
if SHOP_ATTACHED:
    INSTALLED_APPS += [
        "guardian",
        "opsconsole.apps.QuietKnoxConfig",
        "rest_framework",
        "drf_spectacular",
        "drf_spectacular_sidecar",
        "opsconsole",
        "grants",
        "incidents",
        "opsconsole.jobs",
        "deadletters",
        "repairs",
    ]
    ANONYMOUS_USER_NAME = None
    GUARDIAN_MONKEY_PATCH_USER = False
    SILENCED_SYSTEM_CHECKS = ["guardian.W001"]

    OPSCONSOLE_SOURCE = "shop"
    OPSCONSOLE_JOURNAL_DIR = os.environ.get("SHOP_JOURNAL_DIR", str(FOLDER / "journal"))
    OPSCONSOLE_IDENTITY = "shop.identity.identity"
    OPSCONSOLE_TASK_POLICIES = [
        {"pattern": "shop.tasks.*", "team": "Shop", "severity": "high"},
        {"pattern": "shop.tasks.bill", "team": "Money", "severity": "critical", "effects": "outside"},
    ]
