"""Validates manifests offline and strictly, by the schemas of Kubernetes and of JobSet.

The official schemas say `string` where a cluster allows a few words. WORDS adds those words."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import referencing
import yaml

Document = dict[str, Any]

ValidationError = jsonschema.ValidationError

VERSIONS = ("1.33", "1.34", "1.37")
"""The first that all of our fields are in for good, the stand-in's, and the last one known."""
VERSION = "1.34"
JOBSET = yaml.safe_load(Path(__file__).with_name("jobset-v1alpha2.yaml").read_text())
BASE = "https://kubernetes.io/api/"

BATCH, CORE = "io.k8s.api.batch.v1.", "io.k8s.api.core.v1."
WORDS = {
    f"{BATCH}JobSpec": {
        "completionMode": ("Indexed", "NonIndexed"),
        "podReplacementPolicy": ("Failed", "TerminatingOrFailed"),
    },
    f"{BATCH}PodFailurePolicyRule": {"action": ("FailJob", "FailIndex", "Ignore", "Count")},
    f"{BATCH}PodFailurePolicyOnExitCodesRequirement": {"operator": ("In", "NotIn")},
    f"{BATCH}PodFailurePolicyOnPodConditionsPattern": {"status": ("True", "False", "Unknown")},
    f"{CORE}PodSpec": {
        "restartPolicy": ("Always", "OnFailure", "Never"),
        "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
        "preemptionPolicy": ("PreemptLowerPriority", "Never"),
    },
    f"{CORE}PodSecurityContext": {"fsGroupChangePolicy": ("Always", "OnRootMismatch")},
    f"{CORE}SeccompProfile": {"type": ("Localhost", "RuntimeDefault", "Unconfined")},
    f"{CORE}Toleration": {
        "operator": ("Exists", "Equal", "Lt", "Gt"),
        "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
    },
    f"{CORE}Container": {
        "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
        "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
    },
    f"{CORE}ContainerPort": {"protocol": ("TCP", "UDP", "SCTP")},
    f"{CORE}EmptyDirVolumeSource": {"medium": ("", "Memory", "HugePages")},
    f"{CORE}HostPathVolumeSource": {
        "type": (
            *("", "DirectoryOrCreate", "Directory", "FileOrCreate", "File", "Socket"),
            *("CharDevice", "BlockDevice"),
        )
    },
    f"{CORE}ServiceSpec": {"type": ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")},
    f"{CORE}ServicePort": {"protocol": ("TCP", "UDP", "SCTP")},
}
"""What a field may hold, by definition and name, as the reference of Kubernetes' API has it."""


class NoSchemaError(Exception):
    """Kubernetes has no such kind."""


def check(document: Document, version: str = VERSION) -> None:
    """ValidationError, with where and what, for what a cluster of this version would not take."""
    validator_of(str(document["kind"]), str(document["apiVersion"]), version).validate(document)


@functools.cache
def validator_of(kind: str, api_version: str, version: str) -> Any:
    """The validator of a kind; NoSchemaError where there is none."""
    if (kind, api_version) == ("JobSet", "jobset.x-k8s.io/v1alpha2"):
        schema = {**JOBSET, "$id": f"{BASE}jobset"}
    else:
        group, slash, name = api_version.rpartition("/")
        parts = (kind.lower(), *([group.partition(".")[0]] if slash else []), name)
        try:
            schema = _read(f"{'-'.join(parts)}.json", version)
        except FileNotFoundError:
            raise NoSchemaError(f"{kind} of {api_version} in Kubernetes {version}") from None
    registry = referencing.Registry().with_resource(f"{BASE}_definitions.json", _shared(version))
    return jsonschema.Draft202012Validator(schema, registry=registry)


@functools.cache
def _shared(version: str) -> Any:
    """The definitions that all kinds refer to, with the words that their fields may hold."""
    found = _read("_definitions.json", version)
    for definition, fields in WORDS.items():
        for field, words in fields.items():
            found["$defs"][definition]["properties"][field]["enum"] = [*words, None]
    return referencing.Resource.from_contents(found)


def _read(file: str, version: str) -> Document:
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    return kubernetes_validate.utils.schema_contents(f"{folder}/{file}", version)
