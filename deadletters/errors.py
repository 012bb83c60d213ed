"""What this app refuses, each with what to do next."""

from opsconsole.core.errors import OpsError


class HoldNotFound(OpsError):
    """There is no such hold, or it is not yours to see; ask whoever grants access to its tenant."""

    code = "hold_not_found"
    status = 404
    message = "There is no such hold, or you may not see it."


class HoldInvalid(OpsError):
    """Name a task, a queue or a task id; a payload only together with its task."""

    code = "hold_invalid"
    status = 400
    message = "{detail}"


class HoldEndInvalid(OpsError):
    """A hold needs an end that lies ahead, and not further than a week: it can be moved again before it comes."""

    code = "hold_end_invalid"
    status = 400
    message = "A hold ends at a time that lies ahead, within {days} days."


class HoldNotActive(OpsError):
    """It holds nothing any more. Place another one, or send on what it has put aside."""

    code = "hold_not_active"
    status = 409
    message = "The hold is {state} already; nothing was changed."


class TooManyHolds(OpsError):
    """End holds that are not needed: each worker compares each job with every one of them."""

    code = "too_many_holds"
    status = 409
    message = "{most} holds are in force already."


class HoldChanged(OpsError):
    """Somebody changed it since it was read; look at it again and decide again."""

    code = "hold_changed"
    status = 412
    message = "The hold has changed since you looked at it."


class PayloadNotKnown(OpsError):
    """There is no such failed job that you may see, or its message cannot be read. Hold the task or the task id."""

    code = "payload_not_known"
    status = 404
    message = "There is no failed job of this id whose payload can be compared, or you may not see it."
