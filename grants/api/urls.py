"""Routes of this app, relative to the API's version."""

from django.urls import path

from grants.api import views

urlpatterns = [
    path("audit", views.AuditList.as_view(), name="audit"),
    path("me", views.Me.as_view(), name="me"),
    path("authorize", views.Authorize.as_view(), name="authorize"),
    path("grants", views.GrantList.as_view(), name="grants"),
    path("grants/<str:grant_id>/revoke", views.GrantRevoke.as_view(), name="grant-revoke"),
]
