"""What a server does by itself for a yard: runs that went silent are marked and started again,
failures are told to people, a training is started when a corpus has news."""

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
"""What a run says that crashed with its worker: by the automation below, or, where the worker was
told to stop and could still say so, by Prefect."""

ONCE = timedelta(days=365)
"""A trigger that has fired for a run and its count does not fire for them again within that."""

MESSAGE = (
    '{"text": {{ (flow.name ~ "/" ~ flow_run.name ~ " in yard %s: " ~ flow_run.state.name ~ ". " '
    '~ (flow_run.state.message or "") ~ " " ~ (flow_run|ui_url)) | tojson }}}'
)
"""A template of Prefect's. It quotes the words itself: a message may hold quotes and lines."""


async def register_automations(registration: Registration) -> None:
    """Write those that the profile asks for, after the deployments."""
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
    else:  # when it is dry: the deployment would be new as well
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
    keys = [key for key in AutomationCore.model_fields if _of(there, key) != _of(automation, key)]
    if not keys:
        report.unchanged(what)
        return
    report.changed(what, keys)
    if not report.is_dry:
        await client.update_automation(found[0].id, automation)


def _of(automation: AutomationCore, key: str) -> object:
    return getattr(automation, key)


# --- what they are --------------------------------------------------------------------------------


def zombies(desired: DesiredState) -> AutomationCore:
    """A run that was not heard of any more, and did not end, is marked as crashed.

    Its worker is gone, or its machine is. The mark lets failures be told and limits be freed; the
    run's jobs go on where a scheduler has them, and are found again by the next attempt."""
    seconds = desired.profile.automations.zombie_seconds
    return _when_silent(
        desired,
        ZOMBIES,
        f"A flow run that is silent for {seconds} s has crashed.",
        after=HEARTBEAT,
        expect={HEARTBEAT, CANCELLING, *ENDS},
        state=StateType.CRASHED,
        message=f"{SILENT} {seconds} s: its worker, or the machine of its worker, is gone. "
        f"Started again, it goes on from what it made.",
    )


def cancelled(desired: DesiredState) -> AutomationCore:
    """A run that a person cancels and nobody ends is marked as cancelled: its worker is gone.

    As crashed it would be started again, against that person's will."""
    seconds = desired.profile.automations.zombie_seconds
    return _when_silent(
        desired,
        CANCELLED,
        f"A flow run that nobody ended {seconds} s after it was cancelled.",
        after=CANCELLING,
        expect=ENDS,
        state=StateType.CANCELLED,
        message=f"Cancelled {seconds} s ago, and nobody ended it: its worker is gone. A "
        f"scheduler may still have a job of it: end that there.",
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
    """A run is given a state when for `zombie_seconds` after one event none of the others came."""
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
    """A run that crashed with its worker is started again, on whatever worker the pool has: what is
    published is reused, a job that is still there is followed, a training goes on.

    Prefect counts how often a run began; each count fires once, and none above the bound."""
    most = desired.profile.automations.resume_crashed
    return AutomationCore(
        name=desired.automation_name(RESUMED),
        description=f"A flow run whose worker is gone is started again, {most} times at most.",
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
                message=f"Its worker is gone: started again by itself, {most} times at most.",
            )
        ],
    )


def failures(desired: DesiredState, webhook: UUID) -> AutomationCore:
    """A run that failed or crashed is posted to a chat, as `{"text": ...}`."""
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
    """A new version of a corpus of this yard starts a training of a recipe, whose `tokens` is the
    pointer."""
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
        actions=[_run(recipe, deployment)],
    )


def _run(recipe: str, deployment: UUID) -> RunDeployment:
    return RunDeployment(
        source="selected",
        deployment_id=deployment,
        parameters={"recipe": recipe},
        job_variables=None,
    )


def _tagged(desired: DesiredState) -> ResourceSpecification:
    """Runs of this yard alone."""
    tag = f"prefect.tag.{desired.tags[-1]}"
    return ResourceSpecification({"prefect.resource.id": [tag], "prefect.resource.role": ["tag"]})
