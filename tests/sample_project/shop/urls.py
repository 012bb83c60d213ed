"""The shop's routes, and the console's where it is attached."""

from django.conf import settings
from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.urls import include, path


def front_page(request: HttpRequest) -> HttpResponse:
    return HttpResponse("the shop")


urlpatterns = [path("", front_page), path("admin/", admin.site.urls)]
if settings.SHOP_ATTACHED:
    from opsconsole.console.site import site

    urlpatterns += [path("ops/", site.urls), path("console-api/", include("opsconsole.api.urls"))]
