"""What the controllers of a cluster do, for the stand-in: jobs make pods, and pods end.

Indexed Jobs with back-off, pod failure policy, deadline, suspension and time to live; JobSets of
one Job; deletion of what is owned. Scheduling knows labels of nodes and claims, nothing of room."""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from tests.yard.kubernetes.fake_kube_pods import Container, Network, container_status, start
from tests.yard.kubernetes.fake_kube_store import Document, Store, now

INDEX = "batch.kubernetes.io/job-completion-index"
NODE_LOST_SECONDS = 0.5
BACK_OFF_SECONDS = 0.3


class JobFailedError(Exception):
    """The controller gives the job up: reason and message of the condition."""


def condition(kind: str, reason: str, message: str = "", status: str = "True") -> Document:
    fields = {"type": kind, "status": status, "reason": reason, "message": message}
    return {**fields, "lastTransitionTime": now()}


@dataclass
class Cluster:
    """Nodes, and what runs on them."""

    store: Store
    folder: Path
    nodes: dict[str, dict[str, str]] = field(
        default_factory=lambda: {"node-1": {"disk": "fast"}, "node-2": {"disk": "slow"}}
    )
    """Labels by name."""
    claims: set[str] = field(default_factory=lambda: {"yard"})
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    quota: str = ""
    """Message of a refusal to make pods; empty: none is refused."""
    containers: dict[str, Container] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    """Nodes without power."""
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    # --- jobs ---------------------------------------------------------------------------------

    def begin(self, plural: str, document: Document) -> None:
        """What a controller does with a new object."""
        if plural == "jobs":
            self._task(document, self._run_job(document))
        elif plural == "jobsets":
            self._task(document, self._run_jobset(document))

    def _task(self, document: Document, coroutine: object) -> None:
        assert asyncio.iscoroutine(coroutine)
        self.tasks[document["metadata"]["uid"]] = asyncio.ensure_future(coroutine)

    async def _run_jobset(self, jobset: Document) -> None:
        meta, (replicated,) = jobset["metadata"], jobset["spec"]["replicatedJobs"]
        template = replicated["template"]
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "name": f"{meta['name']}-{replicated['name']}-0",
                "labels": dict(template["metadata"]["labels"]),
                "ownerReferences": [{"uid": meta["uid"]}],
            },
            "spec": deepcopy(template["spec"]),
        }
        job["spec"]["template"]["spec"]["subdomain"] = meta["name"]
        self.store.add("jobs", meta["namespace"], job)
        await self._run_job(job)
        name = "Completed" if job["status"]["conditions"][-1]["type"] == "Complete" else "Failed"
        reason = "AllJobsCompleted" if name == "Completed" else "FailedJobs"
        jobset["status"] = {"conditions": [condition(name, reason, "jobset has ended")]}
        self.store.touch("jobsets", jobset)

    async def _run_job(self, job: Document) -> None:
        spec, network = job["spec"], Network(Path(tempfile.mkdtemp(dir=self.folder)))
        completed: set[int] = set()
        failed: set[int] = set()
        try:
            while spec.get("suspend"):
                await asyncio.sleep(0.05)
            job["status"] = {"active": spec["parallelism"], "startTime": now()}
            self.store.touch("jobs", job)
            async with asyncio.timeout(spec.get("activeDeadlineSeconds")):
                await self._run_indices(job, network, completed, failed)
            if failed:
                raise JobFailedError("FailedIndexes", "Job has failed indexes")
            ended_as = condition("Complete", "CompletionsReached")
        except TimeoutError:
            text = "Job was active longer than specified deadline"
            ended_as = await self._give_up(job, "DeadlineExceeded", text)
        except JobFailedError as error:
            ended_as = await self._give_up(job, *error.args)
        finally:
            network.close()
        job["status"] |= {"active": 0, "conditions": [ended_as]}
        self._count(job, completed, failed)
        if spec.get("ttlSecondsAfterFinished", 9999) < 60:
            await asyncio.sleep(spec["ttlSecondsAfterFinished"])
            await self._remove_job(job)

    async def _give_up(self, job: Document, reason: str, message: str) -> Document:
        job["status"]["conditions"] = [condition("FailureTarget", reason, message)]
        self.store.touch("jobs", job)
        await asyncio.gather(*(self.delete_pod(pod) for pod in self._pods_of(job)))
        return condition("Failed", reason, message)

    def _count(self, job: Document, completed: Iterable[int], failed: Iterable[int]) -> None:
        job["status"]["completedIndexes"] = ",".join(map(str, sorted(completed)))
        job["status"]["failedIndexes"] = ",".join(map(str, sorted(failed)))
        self.store.touch("jobs", job)

    async def _run_indices(
        self, job: Document, network: Network, completed: set[int], failed: set[int]
    ) -> None:
        slots = asyncio.Semaphore(job["spec"]["parallelism"])
        failures = 0

        async def one(index: int) -> None:
            nonlocal failures
            async with slots:
                while True:
                    pod = await self._run_pod(job, index, network)
                    if pod["status"]["phase"] == "Succeeded":
                        completed.add(index)
                        break
                    action = _by_policy(job, pod)
                    if action == "Ignore":
                        continue
                    if action == "FailIndex" or "backoffLimitPerIndex" in job["spec"]:
                        failed.add(index)
                        break
                    failures += 1
                    if failures > job["spec"].get("backoffLimit", 6):
                        text = "Job has reached the specified backoff limit"
                        raise JobFailedError("BackoffLimitExceeded", text)
                self._count(job, completed, failed)

        try:
            async with asyncio.TaskGroup() as group:
                for index in range(job["spec"]["completions"]):
                    group.create_task(one(index))
        except* JobFailedError as errors:
            raise errors.exceptions[0] from None

    # --- pods ---------------------------------------------------------------------------------

    async def _run_pod(self, job: Document, index: int, network: Network) -> Document:
        """A pod to its end."""
        meta, template = job["metadata"], job["spec"]["template"]
        while self.quota:
            self._event("Job", meta, "FailedCreate", f"Error creating: {self.quota}")
            await asyncio.sleep(BACK_OFF_SECONDS)
        prefix = f"{meta['name']}-{index}-"
        of_job = {"batch.kubernetes.io/job-name": meta["name"], INDEX: str(index)}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": prefix + uuid.uuid4().hex[:5],
                "generateName": prefix,
                "labels": {**template["metadata"].get("labels", {}), **of_job},
                "annotations": {INDEX: str(index)},
                "ownerReferences": [{"uid": meta["uid"]}],
            },
            "spec": deepcopy(template["spec"]),
            "status": {"phase": "Pending"},
        }
        self.store.add("pods", meta["namespace"], pod)
        if await self._place(pod, index) and await self._pull(pod):
            container = await start(pod, network, str(index), self.secrets)
            watching = asyncio.ensure_future(self._watch_over(pod, container))
            self.tasks[pod["metadata"]["uid"]] = watching
        while pod["status"]["phase"] not in ("Succeeded", "Failed"):
            await asyncio.sleep(0.05)
        return pod

    async def _place(self, pod: Document, index: int) -> bool:
        """Find a node; False when the pod goes before there is one."""
        while not self._is_going(pod):
            fitting, why = self._nodes_for(pod)
            if fitting:
                pod["spec"]["nodeName"] = fitting[index % len(fitting)]
                return True
            scheduled = condition("PodScheduled", "Unschedulable", why, "False")
            self._set(pod, conditions=[scheduled])
            await asyncio.sleep(BACK_OFF_SECONDS)
        return False

    def _nodes_for(self, pod: Document) -> tuple[list[str], str]:
        wanted = pod["spec"].get("nodeSelector", {})
        volumes = pod["spec"].get("volumes", ())
        claims = {v["persistentVolumeClaim"]["claimName"] for v in volumes if _is_claim(v)}
        if missing := sorted(claims - self.claims):
            return [], f'0/2 nodes are available: persistentvolumeclaim "{missing[0]}" not found.'
        up = {name: labels for name, labels in self.nodes.items() if name not in self.lost}
        fitting = [name for name, labels in up.items() if wanted.items() <= labels.items()]
        text = f"0/{len(up)} nodes are available: {len(up)} node(s) didn't match Pod's node "
        return fitting, f"{text}affinity/selector."

    async def _pull(self, pod: Document) -> bool:
        """Wait for the image and the secrets; False if the pod is deleted first."""
        container = pod["spec"]["containers"][0]
        while not self._is_going(pod):
            sources = container.get("envFrom", ())
            missing = [s["secretRef"]["name"] for s in sources]
            missing = [name for name in missing if name not in self.secrets]
            if container["image"].endswith(":missing"):
                why = f'failed to resolve reference "{container["image"]}": not found'
                state = {"reason": "ErrImagePull", "message": why}
            elif missing:
                why = f'secret "{missing[0]}" not found'
                state = {"reason": "CreateContainerConfigError", "message": why}
            else:
                return True
            self._wait_for(pod, state)
            await asyncio.sleep(BACK_OFF_SECONDS)
            if state["reason"] == "ErrImagePull":
                message = f'Back-off pulling image "{container["image"]}"'
                self._wait_for(pod, {"reason": "ImagePullBackOff", "message": message})
                await asyncio.sleep(BACK_OFF_SECONDS)
        return False

    def _wait_for(self, pod: Document, state: Document) -> None:
        name, image = (pod["spec"]["containers"][0][key] for key in ("name", "image"))
        self._set(pod, containerStatuses=[container_status(name, image, {"waiting": state})])

    async def _watch_over(self, pod: Document, container: Container) -> None:
        name, image = pod["metadata"]["name"], pod["spec"]["containers"][0]["image"]
        self.containers[name] = container
        running = container_status(container.name, image, {"running": {"startedAt": now()}})
        self._set(pod, phase="Running", startTime=now(), containerStatuses=[running])
        listening = asyncio.ensure_future(container.listen())
        limit = pod["spec"].get("activeDeadlineSeconds")
        _, late = await asyncio.wait([listening], timeout=limit)
        if late:
            text = "Pod was active on the node longer than the specified deadline"
            self._set(pod, reason="DeadlineExceeded", message=text)
            await container.stop(pod["spec"].get("terminationGracePeriodSeconds", 30))
        await listening
        if pod["spec"]["nodeName"] in self.lost:
            return  # nobody is there to say how it ended
        phase = "Succeeded" if container.process.returncode == 0 else "Failed"
        self._set(pod, phase=phase, containerStatuses=[container.status(image)])
        container.clean()
        container.ended.set()

    def _set(self, pod: Document, **status: object) -> None:
        if all(pod["status"].get(name) == value for name, value in status.items()):
            return
        pod["status"] |= status
        self.store.touch("pods", pod)

    @staticmethod
    def _is_going(pod: Document) -> bool:
        return "deletionTimestamp" in pod["metadata"]

    def _pods_of(self, job: Document) -> list[Document]:
        selector = f"batch.kubernetes.io/job-name={job['metadata']['name']}"
        return self.store.all("pods", job["metadata"]["namespace"], selector)

    # --- ends ---------------------------------------------------------------------------------

    async def delete_pod(self, pod: Document) -> None:
        """SIGTERM, the grace, SIGKILL; then it is gone."""
        if self._is_going(pod):
            return
        pod["metadata"]["deletionTimestamp"] = now()
        self.store.touch("pods", pod)
        container = self.containers.get(pod["metadata"]["name"])
        if container is not None and pod["status"]["phase"] == "Running":
            await container.stop(pod["spec"].get("terminationGracePeriodSeconds", 30))
            await container.ended.wait()
        elif container is None:
            self._set(pod, phase="Failed")
        self.store.remove("pods", pod)

    async def disrupt(self, pod: Document, reason: str, message: str) -> None:
        """Take a pod's node away, with a word of why."""
        self._set(pod, conditions=[condition("DisruptionTarget", reason, message)])
        await self.delete_pod(pod)

    async def lose(self, node: str) -> None:
        """Power off: processes are gone at once, and the cluster learns of it later."""
        self.lost.add(node)
        pods = [
            pod
            for (plural, _, _), pod in self.store.objects.items()
            if plural == "pods" and pod["spec"].get("nodeName") == node
        ]
        for pod in pods:
            if (container := self.containers.get(pod["metadata"]["name"])) is not None:
                container.send(9)
        await asyncio.sleep(NODE_LOST_SECONDS)
        text = "Taint manager: deleting due to NoExecute taint"
        for pod in pods:
            if pod["status"]["phase"] == "Running":
                disruption = condition("DisruptionTarget", "DeletionByTaintManager", text)
                pod["metadata"]["deletionTimestamp"] = now()
                self._set(pod, conditions=[disruption])
                self._set(pod, phase="Failed")
                self.store.remove("pods", pod)

    async def delete(self, plural: str, document: Document, propagation: str) -> None:
        """Remove an object and what it owns; in the foreground it stays until that is gone."""
        if plural in ("jobs", "jobsets"):
            document["metadata"]["deletionTimestamp"] = now()
            if propagation == "Foreground":
                self.store.touch(plural, document)
            await self._remove_job(document, plural)
        elif plural == "pods":
            await self.delete_pod(document)
        else:
            self.store.remove(plural, document)

    async def _remove_job(self, job: Document, plural: str = "jobs") -> None:
        task = self.tasks.pop(job["metadata"]["uid"], None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if plural == "jobs":
            await asyncio.gather(*(self.delete_pod(pod) for pod in self._pods_of(job)))
        owned = [one for one in list(self.store.objects.items()) if _owns(job, one[1])]
        for (kind, _, _), one in owned:
            await self.delete(kind, one, "Background")
        self.store.remove(plural, job)

    def _event(self, kind: str, about: Document, reason: str, message: str) -> None:
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{about['name']}.{uuid.uuid4().hex[:8]}"},
            "involvedObject": {"kind": kind, "name": about["name"]},
            "type": "Warning",
            "reason": reason,
            "message": message,
            "lastTimestamp": now(),
        }
        self.store.add("events", about["namespace"], event)

    async def close(self) -> None:
        """End what would make pods, then all processes."""
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        for container in self.containers.values():
            if container.process.returncode is None:
                container.process.kill()  # and its child with it
                await container.process.wait()
            container.clean()
        self.tasks.clear()
        self.containers.clear()


def _owns(owner: Document, document: Document) -> bool:
    uids = [one["uid"] for one in document["metadata"].get("ownerReferences", ())]
    return owner["metadata"]["uid"] in uids


def _is_claim(volume: Document) -> bool:
    return "persistentVolumeClaim" in volume


def _by_policy(job: Document, pod: Document) -> str:
    """The action of the first rule that fits; JobFailedError for FailJob."""
    meta, status = pod["metadata"], pod["status"]
    name = f"{meta['namespace']}/{meta['name']}"
    held = {one["type"] for one in status.get("conditions", ()) if one["status"] == "True"}
    states = status.get("containerStatuses", ())
    codes = [s["state"].get("terminated", {}).get("exitCode") for s in states]
    rules = job["spec"].get("podFailurePolicy", {}).get("rules", ())
    for number, rule in enumerate(rules):
        wanted = rule.get("onExitCodes")
        if wanted is None:
            fits = any(one["type"] in held for one in rule["onPodConditions"])
            message = f"Pod {name} has condition DisruptionTarget matching"
        else:
            fits = any(code in wanted["values"] for code in codes)
            message = (
                f"Container {wanted.get('containerName')} for pod {name} failed with exit code "
            )
            message += f"{codes[0] if codes else None} matching"
        if fits and rule["action"] == "FailJob":
            raise JobFailedError("PodFailurePolicy", f"{message} FailJob rule at index {number}")
        if fits:
            return str(rule["action"])
    return "Count"
