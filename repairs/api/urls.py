"""Routes of this app, relative to the API's version."""

from django.urls import path

from repairs.api import holds, jobs, redrives, views

urlpatterns = [
    path("incidents/<uuid:incident_id>", views.IncidentDetail.as_view(), name="incident"),
    path("incidents/<uuid:incident_id>/timeline", views.IncidentTimeline.as_view(), name="incident-timeline"),
    path("incidents/<uuid:incident_id>/retry", views.IncidentRetry.as_view(), name="incident-retry"),
    path("dead-letters/<uuid:letter_id>", views.LetterDetail.as_view(), name="dead-letter"),
    path("dead-letters/<uuid:letter_id>/payload", views.LetterPayload.as_view(), name="dead-letter-payload"),
    path("dead-letters/<uuid:letter_id>/retry", views.LetterRetry.as_view(), name="dead-letter-retry"),
    path(
        "dead-letters/<uuid:letter_id>/close-as-done",
        views.LetterCloseAsDone.as_view(),
        name="dead-letter-close-as-done",
    ),
    path("dead-letters/<uuid:letter_id>/discard", views.LetterDiscard.as_view(), name="dead-letter-discard"),
    path("jobs", jobs.JobList.as_view(), name="jobs"),
    path("jobs/<uuid:job_id>", jobs.JobDetail.as_view(), name="job"),
    path("jobs/<uuid:job_id>/payload", jobs.JobPayloadView.as_view(), name="job-payload"),
    path("repair-actions", views.RepairList.as_view(), name="repair-actions"),
    path("repair-actions/<uuid:repair_id>", views.RepairDetail.as_view(), name="repair-action"),
    path("repair-actions/<uuid:repair_id>/cancel", views.RepairCancel.as_view(), name="repair-action-cancel"),
    path("repair-batches/<uuid:batch_id>", views.BatchDetail.as_view(), name="repair-batch"),
    path("holds/<uuid:hold_id>/release", holds.HoldRelease.as_view(), name="hold-release"),
    path("redrives", redrives.RedriveList.as_view(), name="redrives"),
    path("redrives/<uuid:redrive_id>", redrives.RedriveDetail.as_view(), name="redrive"),
    path("redrives/<uuid:redrive_id>/items", redrives.RedriveItems.as_view(), name="redrive-items"),
    path("redrives/<uuid:redrive_id>/approve", redrives.RedriveApprove.as_view(), name="redrive-approve"),
    path("redrives/<uuid:redrive_id>/start", redrives.RedriveStart.as_view(), name="redrive-start"),
    path("redrives/<uuid:redrive_id>/pause", redrives.RedrivePause.as_view(), name="redrive-pause"),
    path("redrives/<uuid:redrive_id>/resume", redrives.RedriveResume.as_view(), name="redrive-resume"),
    path("redrives/<uuid:redrive_id>/cancel", redrives.RedriveCancel.as_view(), name="redrive-cancel"),
    path("redrives/<uuid:redrive_id>/retry-failed", redrives.RedriveRetryFailed.as_view(), name="redrive-retry-failed"),
    path("reconciliation-runs", views.RunList.as_view(), name="reconciliation-runs"),
    path("reconciliation-runs/<uuid:run_id>", views.RunDetail.as_view(), name="reconciliation-run"),
    path("reconciliation-runs/<uuid:run_id>/repairs", views.RunRepairs.as_view(), name="reconciliation-run-repairs"),
]
