"""The shop's Celery application."""

import os

from celery import Celery
from django.conf import settings

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()

if settings.SHOP_ATTACHED:
    from opsconsole.attach import install

    install(app, source="shop")
