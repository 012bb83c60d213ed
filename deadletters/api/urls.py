"""Routes of this app, relative to the API's version."""

from django.urls import path

from deadletters.api import holds, views
from deadletters.api.snapshot import SnapshotView

urlpatterns = [
    path("snapshot", SnapshotView.as_view(), name="snapshot"),
    path("dead-letters", views.LetterList.as_view(), name="dead-letters"),
    path("incidents/<uuid:incident_id>/letters", views.IncidentLetters.as_view(), name="incident-letters"),
    path("worker-nodes", views.NodeList.as_view(), name="worker-nodes"),
    path("holds", holds.HoldList.as_view(), name="holds"),
    path("holds/<uuid:hold_id>", holds.HoldDetail.as_view(), name="hold"),
    path("holds/<uuid:hold_id>/extend", holds.HoldExtend.as_view(), name="hold-extend"),
    path("holds/<uuid:hold_id>/end", holds.HoldEnd.as_view(), name="hold-end"),
]
