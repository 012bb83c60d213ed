"""Who may do what, and who did, over REST."""

from __future__ import annotations

from grants import errors, selectors, services
from grants.access import held_actions
from grants.actions import Action
from grants.api.serializers import (
    AuditEventSerializer,
    AuditListQuery,
    AuthorizeBody,
    ExplanationSerializer,
    GrantBody,
    GrantListQuery,
    GrantListSerializer,
    GrantReceiptSerializer,
    MeSerializer,
    RevokeBody,
)
from grants.models import SCOPE_FIELDS
from grants.resources import Resource
from grants.rest import Answer, Call, OpsView, operation
from opsconsole.core.openapi import paged


class AuditList(OpsView):
    @operation(
        name="list_audit",
        summary="The audit trail",
        tag="audit",
        query=AuditListQuery,
        answer=paged(AuditEventSerializer),
    )
    def get(self, call: Call) -> Answer:
        """Newest first, for who holds `audit.read`. `tenant=*` needs it for every tenant. Reading it is audited."""
        chosen = dict(call.query)
        limit, cursor = chosen.pop("limit"), chosen.pop("cursor", None)
        wanted = selectors.AuditFilter(**chosen)
        return Answer(value=selectors.list_audit(call.operator, wanted, limit=limit, cursor=cursor))


class Me(OpsView):
    @operation(name="get_me", summary="Who you are here", tag="operators", answer=MeSerializer)
    def get(self, call: Call) -> Answer:
        """Your name in audit rows, and the actions that you may do to something."""
        operator = call.operator
        shown = {
            "id": operator.ref,
            "kind": operator.kind.value,
            "name": operator.name,
            "actions": sorted(action.value for action in held_actions(operator)),
            "token_tenant": operator.token_tenant,
        }
        return Answer(value=shown)


class Authorize(OpsView):
    @operation(
        name="explain_authorization",
        summary="Whether you may do something, and why",
        tag="operators",
        body=AuthorizeBody,
        answer=ExplanationSerializer,
        refusals=(errors.PrincipalNotFound,),
    )
    def post(self, call: Call) -> Answer:
        """Changes nothing. About somebody else only with `grants.manage` on what is asked about."""
        asked = dict(call.body)
        action, username = Action(asked.pop("action")), asked.pop("username", None)
        explanation = selectors.explain_to(call.operator, action, Resource(**asked), username=username)
        return Answer(value=explanation)


class GrantList(OpsView):
    @operation(
        name="list_grants",
        summary="Permissions",
        tag="operators",
        query=GrantListQuery,
        answer=GrantListSerializer,
        refusals=(errors.PrincipalNotFound,),
    )
    def get(self, call: Call) -> Answer:
        """Those that you may manage, and your own."""
        held = selectors.grants_named(call.operator, username=call["user"], group=call["group"])
        return Answer(value={"results": held})

    @operation(
        name="give_grant",
        summary="Give a permission",
        tag="operators",
        status=201,
        body=GrantBody,
        answer=GrantReceiptSerializer,
        is_mutation=True,
        refusals=(
            errors.PrincipalNotFound,
            errors.GrantToOneself,
            errors.GrantEndInvalid,
            errors.ScopeInvalid,
            errors.ReasonInvalid,
        ),
    )
    def post(self, call: Call) -> Answer:
        """Only what you hold yourself, for no longer than you do, and never to yourself."""
        wanted = dict(call.body)
        username, groupname = wanted.pop("user", None), wanted.pop("group", None)
        resource = Resource(**{field: wanted[field] for field in SCOPE_FIELDS})
        user, group = selectors.principal_to_manage(call.operator, resource, username=username, group=groupname)
        action = Action(wanted.pop("action"))
        receipt = services.grant(by=call.operator, key=call.key, action=action, user=user, group=group, **wanted)
        return Answer(value=receipt, is_replay=receipt.is_replay)


class GrantRevoke(OpsView):
    @operation(
        name="revoke_grant",
        summary="Take a permission back",
        tag="operators",
        body=RevokeBody,
        answer=GrantReceiptSerializer,
        is_mutation=True,
        refusals=(errors.GrantNotFound, errors.ReasonInvalid),
    )
    def post(self, call: Call, grant_id: str) -> Answer:
        """At once, for users in the middle of something as well."""
        receipt = services.revoke(by=call.operator, grant_id=grant_id, key=call.key, reason=call.body["reason"])
        return Answer(value=receipt, is_replay=receipt.is_replay)
