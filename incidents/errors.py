"""What this app refuses."""

from opsconsole.core.errors import OpsError


class IncidentNotFound(OpsError):
    """There is no such incident, or it is not yours to see; ask whoever grants access to its tenant."""

    code = "operations_incident_not_found"
    status = 404
    message = "There is no such incident, or you may not see it."


class IncidentResolved(OpsError):
    """It is closed. A job of it can still be retried by itself."""

    code = "operations_incident_resolved"
    status = 409
    message = "The incident is resolved already."


class ResolutionInvalid(OpsError):
    """The code is ``[a-z][a-z0-9_]{{1,63}}``, the summary 3 to 2,000 characters."""

    code = "incident_resolution_invalid"
    status = 400
    message = "A resolution has a code such as fixed_upstream and a summary of 3 to 2,000 characters."


class IncidentHasUnresolvedLetters(OpsError):
    """Jobs of it are not repaired. Repair them, or close without repairing by stating how many there are."""

    code = "incident_has_unresolved_letters"
    status = 409
    message = "{unresolved} of its jobs are not repaired; closing without repairing them has to name that number."


class IncidentChanged(OpsError):
    """Somebody changed it since it was read; look at the new state and decide again."""

    code = "incident_changed"
    status = 412
    message = "The incident has changed since you looked at it."


class AcknowledgementLimitInvalid(OpsError):
    """The count at which the acknowledgement ends has to lie above what has been seen so far."""

    code = "acknowledgement_limit_invalid"
    status = 400
    message = "The number of further failures has to be between 1 and 1,000,000."
