"""Settings that run everything from a clean clone: SQLite, a broker made of files, no other service.

Each ``OPSCONSOLE_*`` setting of this product is documented here, once. In the console's own project the plain ones come
from environment variables of the same name; a project that attaches writes them into its own settings module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opsconsole.settings.environment import env

BASE_DIR = Path(__file__).resolve().parent.parent.parent
# Installed from a wheel, BASE_DIR is the folder of installed packages: no place for data.
_CLONE = (BASE_DIR / "manage.py").exists()
VAR_DIR = Path(env.text("OPSCONSOLE_VAR_DIR") or (BASE_DIR / "var" if _CLONE else "~/.local/state/opsconsole"))
VAR_DIR = VAR_DIR.expanduser().absolute()

# -- The product's own settings ----------------------------------------------------------------------------------------

# The name under which this project's workers record: environment, service, broker. One console can show many sources.
OPSCONSOLE_SOURCE = env.text("OPSCONSOLE_SOURCE", "default")
# What the bar of every page says, so that nobody retries in production what they meant to retry elsewhere.
OPSCONSOLE_ENVIRONMENT = env.text("OPSCONSOLE_ENVIRONMENT", "development")
# The release of the running code, shown with each failure; "" if nobody says.
OPSCONSOLE_RELEASE = env.text("OPSCONSOLE_RELEASE")
# What seals stored messages; "" derives a key from SECRET_KEY, which production.py refuses. docs/keys.md has the form
# and how to rotate.
OPSCONSOLE_KEYS = env.text("OPSCONSOLE_KEYS")
# The local folder in which each worker writes down what it received and how it ended. Never on a network disk.
OPSCONSOLE_JOURNAL_DIR: str | None = env.text("OPSCONSOLE_JOURNAL_DIR", str(VAR_DIR / "journal"))
# The queue of this product's own background jobs.
OPSCONSOLE_QUEUE = env.text("OPSCONSOLE_QUEUE", "opsconsole")
# How long a job's message may wait in its queue before it is sent again: a broker may have lost it, or keep it for a
# worker that is gone. The older message is passed over when it turns up.
OPSCONSOLE_DISPATCHED_FOR_SECONDS = env.number("OPSCONSOLE_DISPATCHED_FOR_SECONDS", 900, at_least=1)
# Dotted names of modules with kinds of jobs beside the built-in ones; docs/add-a-job-type.md shows one.
OPSCONSOLE_JOB_KINDS = env.words("OPSCONSOLE_JOB_KINDS")
# Dotted path of a function (task name, args, kwargs, headers) -> (tenant, actor type, actor id); "" puts every job
# under tenant "default".
OPSCONSOLE_IDENTITY = env.text("OPSCONSOLE_IDENTITY")
# What is known about tasks by name pattern (team, severity, runbook, effects, safe errors ...): a list of dicts.
OPSCONSOLE_TASK_POLICIES: list[dict[str, Any]] = []
# Where the pages of docs/ can be read in a browser, for links to the runbooks of the built-in job types; "" names the
# file instead.
OPSCONSOLE_DOCS_URL = env.text("OPSCONSOLE_DOCS_URL")
# Further names of values to blank out in what people read, beside the built-in ones (password, token, ...).
OPSCONSOLE_REDACT = env.words("OPSCONSOLE_REDACT")
# "cause": one incident for all letters with one cause. "job": one incident for each letter.
INCIDENT_GROUPING = env.choice("INCIDENT_GROUPING", ("cause", "job"), "cause")
# Whether failed jobs and incidents are found by their words through an index, which "migrate" makes or removes. It
# costs recording a failure about a tenth of its processor time on PostgreSQL and a third on SQLite. Without one a
# search looks at the newest rows only, and says so.
OPSCONSOLE_SEARCH_INDEX = env.flag("OPSCONSOLE_SEARCH_INDEX", True)

# What calls to other systems are signed with: whsec_ and the base64 of 24 to 64 random bytes. Several, separated by
# commas, sign side by side while receivers change over; "" derives one from SECRET_KEY, which no receiver knows.
OPSCONSOLE_WEBHOOK_SECRET = env.text("OPSCONSOLE_WEBHOOK_SECRET")
# Tenants with secrets of their own: tenant -> secrets as above.
OPSCONSOLE_WEBHOOK_SECRETS: dict[str, str] = {}
# Endpoints (beginnings of URLs) that answer GET <endpoint>/<idempotency key> whether they have done that, with 200
# {"status": "done"} or 404. A job that may have taken effect is then settled by asking instead of by guessing.
OPSCONSOLE_WEBHOOK_PROBES = env.words("OPSCONSOLE_WEBHOOK_PROBES")
# Evidence is fetched from the open internet only; host names, addresses and networks named here may be private.
OPSCONSOLE_EVIDENCE_ALLOW = env.words("OPSCONSOLE_EVIDENCE_ALLOW")
# How many bytes one piece of evidence may have; it is kept in the database.
OPSCONSOLE_EVIDENCE_BYTES = env.number("OPSCONSOLE_EVIDENCE_BYTES", 10 << 20, at_least=1)

# Above how many jobs a redrive needs a second person before it starts; 0 is for every one, empty for none.
OPSCONSOLE_REDRIVE_APPROVAL_ABOVE = env.text("OPSCONSOLE_REDRIVE_APPROVAL_ABOVE") or None
# The queue of low priority to which a redrive may send its jobs instead of to their own; workers have to consume it.
OPSCONSOLE_REDRIVE_QUEUE = env.text("OPSCONSOLE_REDRIVE_QUEUE")

# How many requests the REST API answers per minute, operator and web process, before it says 429.
OPSCONSOLE_API_REQUESTS_PER_MINUTE = env.number("OPSCONSOLE_API_REQUESTS_PER_MINUTE", 1_200, at_least=1)

# How long things are kept. Unresolved letters and the audit trail are kept for ever.
OPSCONSOLE_KEEP_CLOSED_LETTERS_DAYS = env.number("OPSCONSOLE_KEEP_CLOSED_LETTERS_DAYS", 90, at_least=1)
# The message of a closed letter, and with it the possibility to retry it, goes before the letter does.
OPSCONSOLE_KEEP_MESSAGES_DAYS = env.number("OPSCONSOLE_KEEP_MESSAGES_DAYS", 30, at_least=1)
OPSCONSOLE_KEEP_FINISHED_JOBS_DAYS = env.number("OPSCONSOLE_KEEP_FINISHED_JOBS_DAYS", 30, at_least=1)
OPSCONSOLE_KEEP_ATTEMPTS_DAYS = env.number("OPSCONSOLE_KEEP_ATTEMPTS_DAYS", 7, at_least=1)
OPSCONSOLE_KEEP_COUNTS_DAYS = env.number("OPSCONSOLE_KEEP_COUNTS_DAYS", 30, at_least=1)
OPSCONSOLE_KEEP_JOURNAL_HOURS = env.number("OPSCONSOLE_KEEP_JOURNAL_HOURS", 24, at_least=1)  # failed entries only

# -- Django ------------------------------------------------------------------------------------------------------------

INSECURE_SECRET_KEY = "insecure-development-key-of-the-embedded-default"  # noqa: S105  (production.py refuses it)
SECRET_KEY = env.text("OPSCONSOLE_SECRET_KEY", INSECURE_SECRET_KEY)
DEBUG = False
ALLOWED_HOSTS = env.words("OPSCONSOLE_ALLOWED_HOSTS", ["localhost", "127.0.0.1", "[::1]"])
# Browsers share cookies between the ports of one host: other projects on localhost must not sign us out.
SESSION_COOKIE_NAME = "opsconsole_session"
CSRF_COOKIE_NAME = "opsconsole_csrf"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "guardian",
    "knox",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "django_celery_beat",
    "opsconsole",
    "grants",
    "incidents",
    "opsconsole.jobs",
    "deadletters",
    "repairs",
]
MIDDLEWARE = [
    "opsconsole.middleware.RequestIdMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "opsconsole.urls"
WSGI_APPLICATION = "opsconsole.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    }
]
AUTHENTICATION_BACKENDS = ["django.contrib.auth.backends.ModelBackend"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
ANONYMOUS_USER_NAME = None  # guardian's anonymous user: nobody who is not signed in holds a grant here
GUARDIAN_MONKEY_PATCH_USER = False
# Grants are asked through grants' two doors only; guardian's backend behind user.has_perm() would be a third.
SILENCED_SYSTEM_CHECKS = ["guardian.W001"]

_SQLITE = f"sqlite:///{VAR_DIR / 'opsconsole.sqlite3'}"
DATABASES = {"default": env.database("OPSCONSOLE_DATABASE_URL", _SQLITE)}
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    if env.text("OPSCONSOLE_DATABASE_URL", _SQLITE) == _SQLITE:
        env.folder(VAR_DIR, "OPSCONSOLE_VAR_DIR")
    DATABASES["default"]["OPTIONS"] = {
        # Deferred transactions that read and then write fail at once with "database is locked", whatever the timeout.
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL;PRAGMA synchronous=NORMAL;",
    }
elif DATABASES["default"]["ENGINE"] == "django.db.backends.postgresql":
    DATABASES["default"].setdefault("OPTIONS", {}).setdefault("connect_timeout", 5)
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en-gb"
# The API's schema is made with settings of its own (opsconsole/api); the check would judge it without them.
SPECTACULAR_SETTINGS = {"ENABLE_DJANGO_DEPLOY_CHECK": False}
STATIC_URL = "static/"
STATIC_ROOT: str | Path | None = None  # nothing is collected: WhiteNoise serves the files where the packages have them
WHITENOISE_USE_FINDERS = True

# -- E-mail ------------------------------------------------------------------------------------------------------------

# Django's own settings; a session that hangs must not hold a worker.
EMAIL_HOST = env.text("OPSCONSOLE_EMAIL_HOST", "localhost")
EMAIL_PORT = env.number("OPSCONSOLE_EMAIL_PORT", 25, at_least=1)
EMAIL_HOST_USER = env.text("OPSCONSOLE_EMAIL_USER")
EMAIL_HOST_PASSWORD = env.text("OPSCONSOLE_EMAIL_PASSWORD")
EMAIL_USE_TLS = env.flag("OPSCONSOLE_EMAIL_TLS", False)
EMAIL_TIMEOUT = 15
DEFAULT_FROM_EMAIL = env.text("OPSCONSOLE_EMAIL_FROM", "opsconsole@localhost")

# -- Log lines ---------------------------------------------------------------------------------------------------------

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_LOG_LEVEL = env.choice("OPSCONSOLE_LOG_LEVEL", LOG_LEVELS, "INFO")
LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {"context": {"()": "opsconsole.logs.ContextFilter"}},
    "formatters": {
        "lines": {"()": "opsconsole.logs.ReadableLines"},
        "json": {"()": "opsconsole.logs.JsonLines"},
    },
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "filters": ["context"],
            "formatter": env.choice("OPSCONSOLE_LOG_FORMAT", ("lines", "json"), "lines"),
        }
    },
    "root": {"handlers": ["stderr"], "level": _LOG_LEVEL},
    "loggers": {
        # Django's own handlers would print the same line again, or post it.
        "django": {"handlers": [], "level": "INFO", "propagate": True},
        "django.server": {"handlers": [], "level": "INFO", "propagate": True},
        # It tells of each sweep that it sends, several a minute, which buries the rest; "Sweeps" tells how they went.
        "celery.beat": {"level": "WARNING" if _LOG_LEVEL == "INFO" else _LOG_LEVEL},
    },
}

# -- Celery ------------------------------------------------------------------------------------------------------------

CELERY_BROKER_URL = env.text("OPSCONSOLE_BROKER_URL", "filesystem://")
_BROKER = env.broker_scheme("OPSCONSOLE_BROKER_URL", "filesystem://")
# A publisher never waits for ever: connecting, asking and trying again are all bounded (about 6 s in all, measured
# against brokers that refuse, that never answer, and that fall silent after they had answered).
CELERY_BROKER_CONNECTION_TIMEOUT = 1.5
_RETRY = {"max_retries": 1, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.5}
CELERY_TASK_PUBLISH_RETRY_POLICY = _RETRY
CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, Any]
if _BROKER == "filesystem":
    CELERY_BROKER_TRANSPORT = "opsconsole.core.filebroker:Transport"
    _MESSAGES = str(env.folder(VAR_DIR / "broker" / "messages", "OPSCONSOLE_VAR_DIR"))
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        "data_folder_in": _MESSAGES,
        "data_folder_out": _MESSAGES,
        "control_folder": str(VAR_DIR / "broker" / "control"),
        "polling_interval": 0.1,  # the default of a second is felt by whoever presses a button
    }
elif _BROKER.startswith("redis"):
    CELERY_BROKER_TRANSPORT_OPTIONS = {**_RETRY, "socket_timeout": 1.5, "socket_connect_timeout": 1.5}
elif "amqp" in _BROKER:
    # Without confirms RabbitMQ can drop what we believe sent; without the timeouts a confirm is awaited for ever.
    CELERY_BROKER_TRANSPORT_OPTIONS = {**_RETRY, "confirm_publish": True, "read_timeout": 3, "write_timeout": 3}
else:
    CELERY_BROKER_TRANSPORT_OPTIONS = {}
# A worker waits for its broker for as long as it takes; Celery's own default ends it after a hundred tries.
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_DEFAULT_QUEUE = OPSCONSOLE_QUEUE
# No result backend: how a job ended is in the database, and a backend that is down would make publishing fail.
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_TRACK_STARTED = False
# A worker holds one job per process, so that a long one does not keep others waiting.
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_REDIRECT_STDOUTS = False
# Celery closes the database connection around each task, which costs more than a job's own statements (measured); so it
# is kept for this many. The name in the settings is the one that Celery looks for, without its prefix it finds nothing.
CELERY_DB_REUSE_MAX = 1_000
CELERY_BEAT_SCHEDULER = "django_celery_beat.schedulers:DatabaseScheduler"
CELERY_TIMEZONE = TIME_ZONE

env.refuse()
