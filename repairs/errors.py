"""What this app refuses, each with what to do next."""

from opsconsole.core.errors import OpsError


class LetterNotFound(OpsError):
    """There is no such failed job, or it is not yours to see; ask whoever grants access to its tenant."""

    code = "dead_letter_not_found"
    status = 404
    message = "There is no such failed job, or you may not see it."


class RepairNotFound(OpsError):
    """There is no such repair, or it is not yours to see."""

    code = "repair_action_not_found"
    status = 404
    message = "There is no such repair, or you may not see it."


class BatchNotFound(OpsError):
    """There is no such batch of repairs, or it is not yours to see."""

    code = "repair_batch_not_found"
    status = 404
    message = "There is no such batch of repairs, or you may not see it."


class IncidentNotRepairable(OpsError):
    """The incident has no failed job that can be repaired from here; discard it, or send the work anew (A12)."""

    code = "operations_incident_not_repairable"
    status = 409
    message = "This cannot be repaired automatically: {detail}"


class IncidentHasNoLetter(IncidentNotRepairable):
    """The incident names no failed job, so there is nothing to repair (A12)."""

    status = 404
    message = "The incident has no failed job to repair."


class JobOvertaken(OpsError):
    """It is closed, or a repair of it is under way; look at its repairs before you do anything else (C5, C17)."""

    code = "operations_job_overtaken"
    status = 409
    message = "The job is {standing} already; nothing was changed."


class RecordFinished(JobOvertaken):
    """Its record has finished without it; the failed job is closed as overtaken, for nothing is left to repair (C5)."""


class RepairReferenceMissing(OpsError):
    """The ledger has no row of this job any more, or the job no record: there is nothing to put back (A12)."""

    code = "operations_repair_reference_missing"
    status = 409
    message = "The {what} of this job is not there any more, so nothing can be put back to work."


class ProviderOutcomeUnknown(OpsError):
    """Its last attempt may have taken effect. Ask the provider, then say what you found (B6)."""

    code = "provider_outcome_unknown"
    status = 409
    message = "Job {job_id} may already have happened. {reason} Say what the provider knows of it first."


class JobNotServed(OpsError):
    """Start a worker that has this task, or use the task's new name; the letter stays as it is (B7)."""

    code = "job_not_served"
    status = 503
    message = "No live worker serves {job_type}{where}."


class ArgumentsDoNotFit(OpsError):
    """The task's signature has changed since; deploy one that takes these arguments, or discard the job."""

    code = "arguments_do_not_fit"
    status = 409
    message = "The arguments do not fit {job_type} as the workers have it now: {detail}."


class MessageNotCaptured(OpsError):
    """The original message is not here in full, so what would run is not what failed. It cannot be retried."""

    code = "message_not_captured"
    status = 409
    message = "The message was not fully captured ({state}), so the same job cannot be sent again."


class MessageTooDeep(OpsError):
    """The message is nested so deep that it would take the worker down again. It cannot be retried."""

    code = "message_too_deep"
    status = 409
    message = "The message is nested more than 100 levels deep and is never sent again."


class MessageSealedWithUnknownKey(OpsError):
    """Put the key it was sealed with back into OPSCONSOLE_KEYS; the message itself is safe."""

    code = "message_sealed_with_unknown_key"
    status = 409
    message = "The message is sealed with the key {key_id}, which is not configured here."


class MessageExpired(OpsError):
    """Its sender gave it a time after which it must not run. Override that if running it late is right."""

    code = "message_expired"
    status = 409
    message = "The original message expired at {expired_at}; running it now has to be asked for explicitly."


class LetterTooOld(OpsError):
    """Its task's policy says that a job of this age must not run any more. Close it as done, or discard it."""

    code = "letter_too_old"
    status = 409
    message = "The job is too old: {job_type} may be retried for {max_age_seconds} seconds after it first failed."


class LetterSetAside(OpsError):
    """Its recording is not complete; see the set-aside entries first."""

    code = "letter_set_aside"
    status = 409
    message = "The job was set aside while it was recorded and cannot be repaired until that is settled."


class SelectionDrifted(OpsError):
    """The set has changed since you looked; look again, then ask for what is there now."""

    code = "selection_drifted"
    status = 409
    message = "You asked for {expected} jobs, and there are {found} now; nothing was changed."


class TooMany(OpsError):
    """Choose fewer: at most 1,000 at once."""

    code = "too_many_letters"
    status = 400
    message = "{found} jobs are more than the {most} that one request may repair."


class SelectionInvalid(OpsError):
    """Name the letters, or say ``all`` together with the number you expect; an empty choice never means all."""

    code = "selection_invalid"
    status = 400
    message = "{detail}"


class RepairNotCancellable(OpsError):
    """It runs, or it is settled. A running one can be given up once its worker has been silent for a minute."""

    code = "repair_not_cancellable"
    status = 409
    message = "The repair is {state} and can no longer be withdrawn."


class ReconciliationKindInvalid(OpsError):
    """Name a kind of sweep, such as ``stale_leases``; docs/reconciliation.md lists them (A13)."""

    code = "reconciliation_kind_invalid"
    status = 400
    message = "The name of a kind of sweep is a small letter with 1 to 63 small letters, digits or _ after it."


class ReconciliationKindUnknown(OpsError):
    """There is no sweep of this name; docs/reconciliation.md lists those that there are."""

    code = "reconciliation_kind_unknown"
    status = 400
    message = "There is no sweep called {kind}."


class ReconciliationRunning(OpsError):
    """One sweep of a kind runs at a time, and this one does; look at its counts, or wait until it has finished."""

    code = "reconciliation_already_running"
    status = 409
    message = "A sweep of {kind} is already running; nothing was started."


class ReconciliationFinished(OpsError):
    """The run has ended, or was closed as abandoned; its counts stay as they are. Start another one."""

    code = "reconciliation_run_finished"
    status = 409
    message = "The sweep has finished already."


class ReconciliationRunNotFound(OpsError):
    """There is no such run, or it has been removed with what is too old to keep."""

    code = "reconciliation_run_not_found"
    status = 404
    message = "There is no such sweep, or you may not see it."


class ScheduleNotFound(OpsError):
    """There is no such entry, or it is none of the console's own: that is changed where it was made."""

    code = "reconciliation_schedule_not_found"
    status = 404
    message = "There is no such entry of the console's own in the schedule."


class ScheduleInvalid(OpsError):
    """Choose from ten seconds to one day."""

    code = "reconciliation_schedule_invalid"
    status = 400
    message = "A sweep runs every {least} to {most} seconds."


class RedriveNotFound(OpsError):
    """There is no such redrive, or it is not yours to see."""

    code = "redrive_not_found"
    status = 404
    message = "There is no such redrive, or you may not see it."


class RedriveStanding(OpsError):
    """Look at the redrive again: somebody has been first, or it is not so far yet."""

    code = "redrive_standing"
    status = 409
    message = "The redrive is {state}; nothing was changed."


class RedriveEmpty(OpsError):
    """None of the jobs that you named waits for a decision, so there is nothing to run again."""

    code = "redrive_empty"
    status = 409
    message = "None of these jobs waits for a decision; nothing was planned."


class RedriveExists(OpsError):
    """All of these jobs are in another redrive that has not ended: go on with that one, or cancel it first."""

    code = "redrive_exists"
    status = 409
    message = "All of these jobs are in the redrive {redrive} already, which has not ended."


class RedriveInvalid(OpsError):
    """Correct the named field and ask again; nothing was planned."""

    code = "redrive_invalid"
    status = 400
    message = "{detail}"


class RedriveAnswerInvalid(OpsError):
    """Each class takes only some answers, and a statement says where it was seen; nothing was started."""

    code = "redrive_answer_invalid"
    status = 400
    message = "{detail}"


class RedriveNotApproved(OpsError):
    """It is so large that a second person has to approve it before it starts."""

    code = "redrive_not_approved"
    status = 409
    message = "A redrive of {count} jobs starts only once a second person has approved it."


class RedriveOwnApproval(OpsError):
    """Somebody else has to approve it: that a second person has looked is the point."""

    code = "redrive_own_approval"
    status = 409
    message = "Whoever has planned a redrive cannot approve it."


class RedriveChanged(OpsError):
    """It has changed since it was read, by a decision or by itself; look at it again and decide again."""

    code = "redrive_changed"
    status = 412
    message = "The redrive has changed since you looked at it."
