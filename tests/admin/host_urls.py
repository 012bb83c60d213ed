"""The routes of a host project that has an admin of its own and attaches the console beside it."""

from django.contrib import admin
from django.urls import path

from opsconsole.console.site import site

urlpatterns = [path("admin/", admin.site.urls), path("ops/", site.urls)]
