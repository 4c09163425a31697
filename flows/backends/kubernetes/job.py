"""A stage as a job of Kubernetes: created once, found again, followed to its end.

The job outlives whoever created it. Its label and its name hold the key of the submission, so a
flow that was killed and started again follows the job that is there instead of making another.
What is watched while it lives: flows/backends/kubernetes/run.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml
from prefect.blocks.abstract import JobBlock

from flows.backends.backoff import SubmitBackoff
from flows.backends.base import when_found
from flows.backends.events import note
from flows.backends.kubernetes.api import RefusedError
from flows.backends.kubernetes.client import KubernetesClient
from flows.backends.kubernetes.evidence import read_ends
from flows.backends.kubernetes.manifests import MANIFESTS, render_kubernetes, resource_name
from flows.backends.kubernetes.options import KubernetesOptions, Variant
from flows.backends.kubernetes.pod import Document
from flows.backends.kubernetes.run import KubernetesJobRun
from flows.backends.notes import SUBMITTED, read_note, run_folder_io, write_note
from flows.backends.outcome import Outcome
from flows.backends.spec import LaunchSpec
from trainyard.errors import ConfigError, TrainyardError

ROOM_PAUSE_SECONDS = 30.0
"""Between two tries to create a job that the quota refuses."""
KINDS = {"job": "Job", "jobset": "JobSet"}


class KubernetesJob(JobBlock[Outcome]):
    """Runs a stage in pods of a cluster, or follows the job that already does."""

    _block_type_name = "Kubernetes Training Job"
    _block_type_slug = "kubernetes-training-job"
    _description = "Runs a stage's own command in pods of Kubernetes."

    spec: LaunchSpec
    options: KubernetesOptions = KubernetesOptions()
    hang_seconds: float | None = None
    """Without a line in any log for so long a job whose pods all run counts as hung."""

    def client(self) -> KubernetesClient:
        """How the cluster is talked to."""
        options = self.options
        return KubernetesClient(options.namespace, options.kubeconfig, options.context)

    async def trigger(self) -> KubernetesJobRun:
        """Find the job of this key, or create it, as soon as the quota of the namespace has room
        for it. Being cancelled meanwhile ends the job."""
        room = SubmitBackoff(self.spec.name, self.options.room_seconds, self.logger)
        return await room.submitted(lambda: when_found(self.spec, self._open()), ROOM_PAUSE_SECONDS)

    async def _open(self) -> KubernetesJobRun:
        folder, name = Path(self.spec.run_directory), resource_name(self.spec)
        with run_folder_io(folder):
            noted = read_note(folder / SUBMITTED, name)
        client = await self.client().open()
        try:
            with run_folder_io(folder):
                if noted is None:
                    kind = await self._find_or_create(client, folder)
                    write_note(folder / SUBMITTED, self._told(kind))
                else:
                    kind = noted["kind"]
                    if read_ends(folder) is None:
                        self._tell_followed()
            return KubernetesJobRun(
                self.spec, self.options, self.hang_seconds, client, kind, self.logger
            )
        except BaseException:
            await client.close()
            raise

    async def _find_or_create(self, client: KubernetesClient, folder: Path) -> str:
        """The kind of what bears the key now."""
        variant, found = await self._look(client)
        documents = render_kubernetes(self.spec, replace(self.options, variant=variant))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFESTS).write_text(yaml.safe_dump_all(documents, sort_keys=False))
        *services, workload = documents
        for service in services:
            await client.create(service)
        made = found or await self._create(client, workload, services)
        for service in services:  # goes with the job, also where one before us made that
            owner = {**workload, "metadata": made["metadata"]}
            await client.own("Service", service["metadata"]["name"], owner)
        if found is not None:
            self._tell_followed()
            return str(workload["kind"])
        name = resource_name(self.spec)
        note(folder, "submitted", job=name)
        where = f"{workload['kind']} {self.options.namespace}/{name}"
        self.logger.info("created %s as %s", self.spec.name, where)
        return str(workload["kind"])

    async def _create(
        self, client: KubernetesClient, workload: Document, services: list[Document]
    ) -> Document:
        try:
            return await client.create(workload)
        except TrainyardError as error:
            if isinstance(error.__cause__, RefusedError):  # else it may have been made
                for service in services:
                    await self._take_back(client, service)
            raise

    async def _take_back(self, client: KubernetesClient, document: Document) -> None:
        kind, name = document["kind"], document["metadata"]["name"]
        try:
            await client.delete(kind, name)
        except TrainyardError as error:  # why there is no job is what has to be told
            self.logger.warning("%s %s is left over: %s", kind, name, error)

    def _tell_followed(self) -> None:
        name = resource_name(self.spec)
        note(self.spec.run_directory, "reattached", job=name)
        where = f"{self.options.namespace}/{name}"
        self.logger.info("%s is job %s already: following it", self.spec.name, where)

    def _told(self, kind: str) -> dict[str, str]:
        return {
            "name": resource_name(self.spec),
            "kind": kind,
            "namespace": self.options.namespace,
        }

    async def _look(self, client: KubernetesClient) -> tuple[Variant, Document | None]:
        """The variant that is there already, and what is there; else the one to make, and None."""
        wanted = await variant_to_make(client, self.options, self.spec.resources.nodes)
        # JobSet may have been installed since a program before this one made a Job.
        variants: tuple[Variant, ...] = ("jobset", "job") if wanted == "jobset" else ("job",)
        for variant in variants:
            found, _ = await client.find(KINDS[variant], self.spec.key)
            for one in found:
                if one["metadata"]["name"] == resource_name(self.spec):
                    return variant, one
        return wanted, None


async def variant_to_make(
    client: KubernetesClient, options: KubernetesOptions, nodes: int
) -> Variant:
    """What a job of so many nodes becomes: a variant that the cluster has. ConfigError where it has
    none that was asked for."""
    if options.variant == "job" or nodes == 1:
        return "job"
    is_there = await client.serves_jobsets()
    if options.variant == "jobset" and not is_there:
        raise ConfigError(
            "Kubernetes option variant: the cluster has no JobSet (its controller is not "
            "installed); use 'auto' or 'job'"
        )
    return "jobset" if is_there else "job"
