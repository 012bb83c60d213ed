"""The WSGI application of the console's own project."""

from __future__ import annotations

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "opsconsole.settings.base")
application = get_wsgi_application()
