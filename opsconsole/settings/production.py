"""Settings for production: everything from environment variables, and no start with ones that make no sense.

PostgreSQL and RabbitMQ or Redis are required. docs/production.md lists the variables; ``base.py`` says what the
product's own ones mean.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from opsconsole.core.sealing import Sealer
from opsconsole.jobs.conf import read_secrets
from opsconsole.settings.environment import env

with env.gathering():
    from opsconsole.settings.base import *  # noqa: F403
    from opsconsole.settings.base import (
        DATABASES,
        INSECURE_SECRET_KEY,
        LOGGING,
        OPSCONSOLE_KEYS,
        OPSCONSOLE_WEBHOOK_SECRET,
        SECRET_KEY,
        VAR_DIR,
    )

    OPSCONSOLE_ENVIRONMENT = env.text("OPSCONSOLE_ENVIRONMENT", "production")
    # Not below VAR_DIR: without the variable it is a folder of the user that runs the worker, outside any release.
    OPSCONSOLE_JOURNAL_DIR = env.text("OPSCONSOLE_JOURNAL_DIR") or None

    if SECRET_KEY == INSECURE_SECRET_KEY:
        env.problem("OPSCONSOLE_SECRET_KEY", "is missing: give it 50 random characters or more of your own")
    elif len(SECRET_KEY) < 50 or len(set(SECRET_KEY)) < 5 or SECRET_KEY.startswith("django-insecure-"):
        env.problem("OPSCONSOLE_SECRET_KEY", "is too short or too plain: use 50 random characters or more")

    if not OPSCONSOLE_KEYS:
        env.problem("OPSCONSOLE_KEYS", "is missing: stored messages need keys that outlive a change of the secret key")
    else:
        try:
            Sealer.from_settings(OPSCONSOLE_KEYS, SECRET_KEY)
        except ValueError as error:
            env.problem("OPSCONSOLE_KEYS", f"is not usable: {error}")

    if OPSCONSOLE_WEBHOOK_SECRET:
        try:
            read_secrets(OPSCONSOLE_WEBHOOK_SECRET)
        except ValueError as error:
            env.problem("OPSCONSOLE_WEBHOOK_SECRET", f"is not usable: {error}")

    if DATABASES["default"]["ENGINE"] != "django.db.backends.postgresql":
        env.problem(
            "OPSCONSOLE_DATABASE_URL", "names a PostgreSQL database (postgresql://user:password@host:5432/name)"
        )
    elif not DATABASES["default"]["NAME"]:
        env.problem("OPSCONSOLE_DATABASE_URL", "lacks the name of the database after the host")

    BROKERS = ("amqp", "amqps", "pyamqp", "redis", "rediss")
    if env.broker_scheme("OPSCONSOLE_BROKER_URL", "filesystem://") not in BROKERS:
        env.problem("OPSCONSOLE_BROKER_URL", "names a RabbitMQ (amqp://...) or a Redis (redis://...)")

    ALLOWED_HOSTS = env.words("OPSCONSOLE_ALLOWED_HOSTS")
    if not ALLOWED_HOSTS:
        env.problem("OPSCONSOLE_ALLOWED_HOSTS", "is missing: the host names, separated by commas, that browsers use")
    if "*" in ALLOWED_HOSTS:
        env.problem("OPSCONSOLE_ALLOWED_HOSTS", "is a list of names: * would let any page speak in our name")

    # Needed only where browsers use another host or port than the one that reaches us.
    CSRF_TRUSTED_ORIGINS = env.words("OPSCONSOLE_CSRF_TRUSTED_ORIGINS")
    for origin in CSRF_TRUSTED_ORIGINS:
        parts = urlsplit(origin)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path:
            env.problem("OPSCONSOLE_CSRF_TRUSTED_ORIGINS", "is a list of origins such as https://ops.example.org")

    # Static files are collected at release time (manage.py collectstatic) and get a name that changes with them.
    STATIC_ROOT = env.text("OPSCONSOLE_STATIC_ROOT", str(VAR_DIR / "static"))
    WHITENOISE_USE_FINDERS = False
    STORAGES = {
        "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
        "staticfiles": {"BACKEND": "whitenoise.storage.CompressedManifestStaticFilesStorage"},
    }

    SESSION_COOKIE_SECURE = True
    CSRF_COOKIE_SECURE = True
    SESSION_COOKIE_AGE = env.number("OPSCONSOLE_SESSION_HOURS", 12, at_least=1) * 3600
    SECURE_HSTS_SECONDS = env.number("OPSCONSOLE_HSTS_SECONDS", 365 * 24 * 3600)
    # Said for this host only; its subdomains may be other people's.
    SECURE_HSTS_INCLUDE_SUBDOMAINS = env.flag("OPSCONSOLE_HSTS_SUBDOMAINS", False)
    SECURE_SSL_REDIRECT = env.flag("OPSCONSOLE_SSL_REDIRECT", True)
    SECURE_REDIRECT_EXEMPT = [r"^healthz$", r"^readyz$"]  # asked over plain HTTP from next door
    # Whoever reaches us past the proxy could send these headers too, so they count only when asked for.
    if env.flag("OPSCONSOLE_BEHIND_PROXY", False):
        SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
        USE_X_FORWARDED_HOST = True
    SILENCED_SYSTEM_CHECKS = [
        "guardian.W001",  # as in base.py
        "security.W005",  # subdomains: above
        "security.W021",  # the browsers' preload list is for whole domains, which this console does not own
    ]

    LOGGING["handlers"]["stderr"]["formatter"] = env.choice("OPSCONSOLE_LOG_FORMAT", ("lines", "json"), "json")
