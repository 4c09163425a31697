"""Automations of a yard on the server: mark and restart silent runs, post failures, train on a new
corpus version."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from prefect.blocks.webhook import Webhook
from prefect.client.schemas.objects import StateType
from prefect.events import ResourceSpecification
from prefect.events.actions import CallWebhook, ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from pydantic import SecretStr

from flows.corpus_refresh import PUBLISHED, YARD
from flows.register.desired_state import (
    CANCELLED,
    FAILED,
    NEW_CORPUS,
    RESUMED,
    ZOMBIES,
    DesiredState,
)
from flows.register.server import Registration
from flows.yard.registered_profile import block_name

HEARTBEAT = "prefect.flow-run.heartbeat"
ENDS = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
CANCELLING = "prefect.flow-run.Cancelling"
CRASHED = "prefect.flow-run.Crashed"
RUN_COUNT = "prefect.run-count"
FAILURES = {"prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"}

SILENT = "Nothing was heard of this run for"
GONE = (
    f"{SILENT} *",
    "Execution was aborted by a termination signal.*",
    "Execution was cancelled by the runtime environment.*",
)
"""State messages of a run that crashed with its worker: from the automation below, or from Prefect
if the worker was stopped and could still report it."""

ONCE = timedelta(days=365)
"""In this time a trigger fires once for each run and run count."""

MESSAGE = (
    '{"text": {{ (flow.name ~ "/" ~ flow_run.name ~ " in yard %s: " ~ flow_run.state.name ~ ". " '
    '~ (flow_run.state.message or "") ~ " " ~ (flow_run|ui_url)) | tojson }}}'
)
"""A template of Prefect, which quotes the text: a message may have quotes and line breaks."""


async def register_automations(registration: Registration) -> None:
    """Write the automations of the profile. Call it after the deployments are written."""
    desired = registration.desired
    chosen = desired.profile.automations
    if chosen.zombie_seconds:
        await _write(registration, zombies(desired))
        await _write(registration, cancelled(desired))
    if chosen.resume_crashed:
        await _write(registration, resumed(desired))
    if desired.notify_url is not None:
        webhook = Webhook(url=SecretStr(desired.notify_url))
        name = f"trainyard-{block_name(desired.profile.name)}-failures"
        block = await registration.block(webhook, name)
        if block is not None:
            await _write(registration, failures(desired, block))
        else:
            registration.report.created(f"automation {desired.automation_name(FAILED)}")
    if chosen.train_on_new_corpus is not None:
        await _training(registration, chosen.train_on_new_corpus)


async def _training(registration: Registration, recipe: str) -> None:
    deployment = registration.deployments.get("pretrain-gpt")
    if deployment is not None:
        await _write(registration, training(registration.desired, recipe, deployment))
    else:  # a dry run, in which the deployment would be new too
        registration.report.created(
            f"automation {registration.desired.automation_name(NEW_CORPUS)}"
        )


async def _write(registration: Registration, automation: AutomationCore) -> None:
    report, client = registration.report, registration.client
    what = f"automation {automation.name}"
    found = await client.read_automations_by_name(automation.name)
    if not found:
        report.created(what)
        if not report.is_dry:
            await client.create_automation(automation)
        return
    there = AutomationCore.model_validate(found[0].model_dump(exclude={"id"}))
    fields = AutomationCore.model_fields
    keys = [key for key in fields if getattr(there, key) != getattr(automation, key)]
    if not keys:
        report.unchanged(what)
        return
    report.changed(what, keys)
    if not report.is_dry:
        await client.update_automation(found[0].id, automation)


# --- what they are --------------------------------------------------------------------------------


def zombies(desired: DesiredState) -> AutomationCore:
    """Marks a run as crashed if it sends no more heartbeats and did not end.

    Its worker or its machine is gone. The mark posts its failure and frees its limits. Its jobs run
    on in a scheduler, where the next attempt finds them."""
    seconds = desired.profile.automations.zombie_seconds
    return _when_silent(
        desired,
        ZOMBIES,
        f"A flow run that is silent for {seconds} s has crashed.",
        after=HEARTBEAT,
        expect={HEARTBEAT, CANCELLING, *ENDS},
        state=StateType.CRASHED,
        message=f"{SILENT} {seconds} s: its worker, or the machine of its worker, is gone. "
        f"It resumes when it is started again.",
    )


def cancelled(desired: DesiredState) -> AutomationCore:
    """Marks a cancelled run as ended if its worker is gone and cannot end it.

    If it were marked as crashed, it would restart, although a person cancelled it."""
    seconds = desired.profile.automations.zombie_seconds
    return _when_silent(
        desired,
        CANCELLED,
        f"A flow run that has not ended {seconds} s after it was cancelled.",
        after=CANCELLING,
        expect=ENDS,
        state=StateType.CANCELLED,
        message=f"Cancelled {seconds} s ago, and its worker is gone. A scheduler may still run a "
        f"job of it: end that there.",
    )


def _when_silent(
    desired: DesiredState,
    name: str,
    description: str,
    *,
    after: str,
    expect: set[str],
    state: StateType,
    message: str,
) -> AutomationCore:
    """Sets a state if no `expect` event follows an `after` event within `zombie_seconds`."""
    return AutomationCore(
        name=desired.automation_name(name),
        description=description,
        trigger=EventTrigger(
            after={after},
            expect=expect,
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            match_related=_tagged(desired),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=desired.profile.automations.zombie_seconds),
        ),
        actions=[ChangeFlowRunState(name=None, force=False, state=state, message=message)],
    )


def resumed(desired: DesiredState) -> AutomationCore:
    """Restarts a run that crashed with its worker, on any worker of the pool. The run reuses
    published outputs, follows a job that still runs, and resumes a training.

    Prefect counts the starts of a run; each count fires once, and none above the limit."""
    most = desired.profile.automations.resume_crashed
    return AutomationCore(
        name=desired.automation_name(RESUMED),
        description=f"A flow run whose worker is gone restarts, {most} times at most.",
        trigger=EventTrigger(
            expect={CRASHED},
            match=ResourceSpecification(
                {
                    "prefect.resource.id": ["prefect.flow-run.*"],
                    RUN_COUNT: [str(count) for count in range(1, most + 1)],
                    "prefect.state-message": list(GONE),
                }
            ),
            match_related=_tagged(desired),
            for_each={"prefect.resource.id", RUN_COUNT},
            posture=Posture.Reactive,
            threshold=1,
            within=ONCE,
        ),
        actions=[
            ChangeFlowRunState(
                name="AwaitingRetry",
                force=False,
                state=StateType.SCHEDULED,
                message=f"Its worker is gone: restarted automatically, {most} times at most.",
            )
        ],
    )


def failures(desired: DesiredState, webhook: UUID) -> AutomationCore:
    """Posts a failed or crashed run to a chat, as `{"text": ...}`."""
    text = MESSAGE % desired.profile.name
    return AutomationCore(
        name=desired.automation_name(FAILED),
        description=f"Posted to the URL of {desired.profile.automations.notify_variable}.",
        trigger=EventTrigger(
            expect=FAILURES,
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            match_related=_tagged(desired),
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[CallWebhook(block_document_id=webhook, payload=text)],
    )


def training(desired: DesiredState, recipe: str, deployment: UUID) -> AutomationCore:
    """Starts a training when a corpus of this yard has a new version, which `tokens` of the recipe
    names through the pointer."""
    return AutomationCore(
        name=desired.automation_name(NEW_CORPUS),
        description=f"A new version of a corpus starts pretrain-gpt of {recipe}.",
        trigger=EventTrigger(
            expect={PUBLISHED},
            match=ResourceSpecification(
                {"prefect.resource.id": ["trainyard.corpus.*"], YARD: [desired.profile.name]}
            ),
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=deployment,
                parameters={"recipe": recipe},
                job_variables=None,
            )
        ],
    )


def _tagged(desired: DesiredState) -> ResourceSpecification:
    """Matches runs of this yard only."""
    tag = f"prefect.tag.{desired.tags[-1]}"
    return ResourceSpecification({"prefect.resource.id": [tag], "prefect.resource.role": ["tag"]})
