"""The ASGI application of the console's own project."""

from __future__ import annotations

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "opsconsole.settings.base")
application = get_asgi_application()
