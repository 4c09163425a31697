"""A stage as a job of Kubernetes: created once, found again, followed to its end.

The job outlives whoever created it. Its label and its name hold the key of the submission, so a
flow that was killed and started again follows the job that is there instead of making another.
What is watched while it lives: flows/blocks/kubernetes_run.py."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import yaml
from prefect.blocks.abstract import JobBlock

from flows.blocks.kubernetes_client import KubernetesClient
from flows.blocks.kubernetes_evidence import read_ends
from flows.blocks.kubernetes_run import KubernetesJobRun
from flows.blocks.notes import SUBMITTED, read_note, write_note
from flows.blocks.run import when_found
from flows.launch.events import note
from flows.launch.kubernetes import MANIFESTS, render_kubernetes, resource_name
from flows.launch.kubernetes_options import KubernetesOptions
from flows.launch.kubernetes_pod import Document
from flows.launch.outcome import Outcome
from flows.launch.spec import LaunchSpec
from trainyard.errors import ConfigError


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
        """Find the job of this key, or create it. Being cancelled meanwhile ends the job."""
        return await when_found(asyncio.create_task(self._open()))

    async def _open(self) -> KubernetesJobRun:
        folder, name = Path(self.spec.run_directory), resource_name(self.spec)
        noted = read_note(folder / SUBMITTED, name)
        client = await self.client().open()
        try:
            if noted is None:
                documents = await self._find_or_create(client, folder)
                _note(folder, name, documents)
            else:
                documents = list(yaml.safe_load_all((folder / MANIFESTS).read_text()))
                if read_ends(folder) is None:
                    self._tell_followed(name)
        except BaseException:
            await client.close()
            raise
        workloads = [one for one in documents if one["kind"] != "Service"]
        return KubernetesJobRun(
            self.spec, self.options, self.hang_seconds, client, workloads, self.logger
        )

    async def _find_or_create(self, client: KubernetesClient, folder: Path) -> list[Document]:
        options = await self._decided(client)
        documents = render_kubernetes(self.spec, options)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFESTS).write_text(yaml.safe_dump_all(documents, sort_keys=False))
        kind = documents[-1]["kind"]
        found, _ = await client.find(kind, self.spec.key)
        there = {one["metadata"]["name"] for one in found}
        made: Document = {}
        for document in documents:
            if document["metadata"]["name"] not in there or document["kind"] == "Service":
                made = await client.create(document)
        if documents[0]["kind"] == "Service":
            name = documents[0]["metadata"]["name"]
            owner = made if made.get("kind") == kind else found[0]
            await client.own("Service", name, {**documents[-1], "metadata": owner["metadata"]})
        name = resource_name(self.spec)
        if there:
            self._tell_followed(name)
        else:
            note(folder, "submitted", job=name)
            self.logger.info(
                "created %s as %s %s/%s", self.spec.name, kind, options.namespace, name
            )
        return documents

    def _tell_followed(self, name: str) -> None:
        note(self.spec.run_directory, "reattached", job=name)
        where = f"{self.options.namespace}/{name}"
        self.logger.info("%s is job %s already: following it", self.spec.name, where)

    async def _decided(self, client: KubernetesClient) -> KubernetesOptions:
        """The options with a variant that the cluster has."""
        options = self.options
        if options.variant == "job" or self.spec.resources.nodes == 1:
            return replace(options, variant="job")
        is_there = await client.serves_jobsets()
        if options.variant == "jobset" and not is_there:
            raise ConfigError(
                "Kubernetes option variant: the cluster has no JobSet (its controller is not "
                "installed); use 'auto' or 'job'"
            )
        return replace(options, variant="jobset" if is_there else "job")


def _note(folder: Path, name: str, documents: list[Document]) -> None:
    last = documents[-1]
    told = {"name": name, "kind": last["kind"], "namespace": last["metadata"]["namespace"]}
    write_note(folder / SUBMITTED, told)
