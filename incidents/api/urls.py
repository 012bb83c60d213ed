"""Routes of this app, relative to the API's version."""

from django.urls import path

from incidents.api import views

urlpatterns = [
    path("incidents", views.IncidentList.as_view(), name="incidents"),
    path("incidents/<uuid:incident_id>/acknowledge", views.Acknowledge.as_view(), name="incident-acknowledge"),
    path("incidents/<uuid:incident_id>/release", views.Release.as_view(), name="incident-release"),
    path("incidents/<uuid:incident_id>/resolve", views.Resolve.as_view(), name="incident-resolve"),
]
