"""The manifests of a run under Kubernetes: a plain Indexed Job with a headless Service, and a TrainJob of Kubeflow Trainer.

    Indexed Job   batch/v1: a pod per node.  torchrun, or widefield itself, reads the pod's number (PET_*, kubernetes.py), and
                  pods find the first one by its name in the Service.
    TrainJob      trainer.kubeflow.org/v1alpha1 of Trainer 2.2 and later, where `runtimePatches` took the place of
                  `podTemplateOverrides`: a runtime of the cluster, as torch-distributed, gives the rest of the pod.

A recipe that is a file goes into a ConfigMap.  The run folder is in a volume that all pods have.
https://kubernetes.io/docs/tasks/job/pod-failure-policy/, https://www.kubeflow.org/docs/components/trainer/
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import yaml
from pydantic import field_validator

from widefield.config.field_types import Positive
from widefield.launchers._job import Allocation, JobFiles, TrainCommand
from widefield.launchers._pod_shell import PATIENCE, patience, with_status_of_ranks
from widefield.redaction import is_secret
from widefield.refusal import REFUSED, TO_BE_CONTINUED

HELP = """\
Write the manifests of a run for Kubernetes into launch/NAME/, and apply one of them with kubectl: a plain
Indexed Job with a headless Service, or a TrainJob of Kubeflow Trainer.  The run folder is in a volume:

  widefield launch kubernetes my.yaml --nodes 4 --gpus 8 --image registry/widefield:1 \\
      --volume claim:/runs --run /runs/first --dry-run
  widefield launch kubernetes digits --image registry/widefield:1 --volume claim:/runs \\
      --run /runs/first --kind trainjob --runtime torch-distributed

Passwords stay out of the manifests; a variable's value is taken from a Secret of the cluster:

  widefield launch kubernetes digits --image registry/widefield:1 --volume claim:/runs \\
      --run /runs/first --secret WANDB_API_KEY=wandb:key
"""
RECIPE = "/etc/widefield/recipe.yaml"
PORT = 29500
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
NAME_MOST = 52
"""Characters of a job's name; pods, whose names are labels of 63 at most, add their number and more."""
RESTARTS = 3
"""How often a Job's pods may fail where `--restarts` does not say it."""


class KubernetesJob(Allocation):
    """What is asked of Kubernetes."""

    image: str | None = None
    """IMAGE: the container's image, with widefield in it"""
    kind: Literal["job", "trainjob"] = "job"
    """KIND: which of the two is submitted, job or trainjob (job)"""
    namespace: str | None = None
    """NAME: the namespace; kubectl's own if left out"""
    name: str | None = None
    """NAME: of the job; the run folder's if left out"""
    volume: list[str] = []
    """CLAIM:/PATH: a persistent volume claim, mounted in all pods; may be given several times"""
    env: list[str] = []
    """NAME=VALUE: a variable of the container; may be given several times"""
    secret: list[str] = []
    """NAME=SECRET:KEY: a variable from a Secret of the cluster; may be given several times"""
    cpus: Positive | None = None
    """N: CPU cores of each pod"""
    memory: str | None = None
    """SIZE: of each pod, as 200Gi"""
    gpu_resource: str = "nvidia.com/gpu"
    """NAME: what GPUs are called in the cluster (nvidia.com/gpu)"""
    node_selector: list[str] = []
    """LABEL=VALUE: of the nodes that will do; may be given several times"""
    runtime: str = "torch-distributed"
    """NAME: the ClusterTrainingRuntime of a TrainJob (torch-distributed)"""
    restarts: Positive | None = None
    """N: how often the pods of a Job may fail and begin again (3)"""
    grace: Positive = 300
    """SECONDS: how long ranks may take to save when a pod is evicted (300)"""

    @field_validator("env", "secret", "volume", "node_selector", mode="after")
    @classmethod
    def _in_pairs(cls, entries: list[str], info: Any) -> list[str]:
        forms = {
            "env": (r"[A-Za-z_]\w*=[\s\S]*", "NAME=VALUE"),
            "secret": (r"[A-Za-z_]\w*=[^:=]+:[^:=]+", "NAME=SECRET:KEY, as WANDB_API_KEY=wandb:key"),
            "volume": (r"[^:]+:/[^:]*", "CLAIM:/PATH, as runs:/runs"),
            "node_selector": (r"[^=]+=[^=]*", "LABEL=VALUE"),
        }
        pattern, form = forms[info.field_name]
        wrong = next((number for number, entry in enumerate(entries, 1) if not re.fullmatch(pattern, entry)), None)
        if wrong is not None:
            raise ValueError(f"number {wrong} has another form; write {form}")
        return entries


def write(command: TrainCommand, options: KubernetesJob) -> JobFiles:
    """Both manifests, and the kubectl that applies one.  ValueError: no image, no volume for the run folder, or no name."""
    name = options.name or command.name
    _check(command, options, name)
    documents = {
        "job": [*_recipe_map(command, options, name), _service(options, name), _job(command, options, name)],
        "trainjob": [*_recipe_map(command, options, name), _train_job(command, options, name)],
    }
    files = {Path("launch", name, f"{kind}.yaml"): _text(kind, listed) for kind, listed in documents.items()}
    path = Path("launch", name, f"{options.kind}.yaml")
    notes = ("what the recipe names (own code, data) must be in the image or in a volume",) * bool(command.text)
    return JobFiles(files, (("kubectl", "apply", "--filename", str(path)),), notes)


def _check(command: TrainCommand, options: KubernetesJob, name: str) -> None:
    if options.image is None:
        raise ValueError("pods need an image with widefield in it; name one, as --image registry/widefield:1")
    if not NAME.fullmatch(name) or len(name) > NAME_MOST:
        raise ValueError(
            f"{name!r} is no name for a job of Kubernetes, which has lower-case letters, digits and hyphens, at most "
            f"{NAME_MOST}; give one with --name"
        )
    if options.kind == "trainjob" and options.restarts is not None:
        raise ValueError(
            f"--restarts {options.restarts} is for --kind job: a TrainJob restarts as often as its runtime says, and cannot "
            f"say it itself; set failurePolicy.maxRestarts in the ClusterTrainingRuntime {options.runtime} instead"
        )
    mounts = [PurePosixPath(entry.partition(":")[2]) for entry in options.volume]
    run = PurePosixPath(command.run)
    if not any(run.is_relative_to(mount) and run != mount for mount in mounts):
        have = ", ".join(map(str, mounts)) or "none"
        raise ValueError(
            f"the run folder {run} is in no volume (mounted: {have}), so checkpoints would end with the pods; mount a claim "
            "and name a folder in it, as --volume runs:/runs --run /runs/first"
        )
    for entry in options.env:
        variable = entry.partition("=")[0]
        if variable.startswith("PET_"):
            raise ValueError(f"{variable} is set by the job itself; leave it out")
        if is_secret(variable):
            raise ValueError(
                f"{variable} is a secret by its name, and a manifest is read by others; put it into a Secret of the cluster "
                f"and give --secret {variable}=SECRET:KEY"
            )


def _text(kind: str, documents: list[dict[str, Any]]) -> str:
    title = f"# Written by `widefield launch kubernetes`: apply it with kubectl apply --filename {kind}.yaml\n"
    return title + "---\n".join(yaml.safe_dump(one, sort_keys=False, width=120) for one in documents)


# ------------------------------------------------------------------------------------------------ the objects


def _object(api: str, kind: str, name: str, options: KubernetesJob, **rest: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "widefield", "app.kubernetes.io/instance": name}
    metadata = {"name": name, **({"namespace": options.namespace} if options.namespace else {}), "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **rest}


def _recipe_map(command: TrainCommand, options: KubernetesJob, name: str) -> list[dict[str, Any]]:
    """The ConfigMap of a recipe that is a file."""
    if not command.text:
        return []
    return [_object("v1", "ConfigMap", f"{name}-recipe", options, data={PurePosixPath(RECIPE).name: command.text})]


def _service(options: KubernetesJob, name: str) -> dict[str, Any]:
    """It gives pods names, also before they are ready, so that they find the first one."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": name},
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    return _object("v1", "Service", name, options, spec=spec)


def _job(command: TrainCommand, options: KubernetesJob, name: str) -> dict[str, Any]:
    container = {
        "name": "widefield",
        "image": options.image,
        "command": _words(command, options),
        "env": [*_meeting(options, name), *_environment(options)],
        "resources": _resources(options),
        "volumeMounts": _mounts(command, options),
    }
    pod = {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": options.grace,
        **_where(options),
        "containers": [container],
        "volumes": _volumes(command, options, name),
    }
    codes = {"containerName": "widefield", "operator": "In"}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},  # evicted: no failure
        {"action": "Ignore", "onExitCodes": {**codes, "values": [TO_BE_CONTINUED]}},
        {"action": "FailJob", "onExitCodes": {**codes, "values": [REFUSED]}},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": options.nodes,
        "parallelism": options.nodes,
        "backoffLimit": (options.restarts or RESTARTS) * options.nodes,  # where one pod fails, all do
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": {"app.kubernetes.io/instance": name}}, "spec": pod},
    }
    return _object("batch/v1", "Job", name, options, spec=spec)


def _train_job(command: TrainCommand, options: KubernetesJob, name: str) -> dict[str, Any]:
    pod = {
        "terminationGracePeriodSeconds": options.grace,
        **_where(options),
        "containers": [{"name": "node", "volumeMounts": _mounts(command, options)}],
        "volumes": _volumes(command, options, name),
    }
    patched = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}
    trainer = {
        "image": options.image,
        "command": _words(command, options),
        "numNodes": options.nodes,
        "numProcPerNode": options.per_node,
        "resourcesPerNode": _resources(options),
        "env": _environment(options),
    }
    spec = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": options.runtime},
        "trainer": trainer,
        "runtimePatches": [{"manager": "widefield", "trainingRuntimeSpec": {"template": {"spec": patched}}}],
    }
    return _object("trainer.kubeflow.org/v1alpha1", "TrainJob", name, options, spec=spec)


# ------------------------------------------------------------------------------------------------ parts of a pod


def _words(command: TrainCommand, options: KubernetesJob) -> list[str]:
    """The container's command: torchrun, which reads PET_*, starts a pod's ranks where there are several."""
    words = command.arguments(recipe=RECIPE if command.text else None)
    return (
        ["widefield", *words] if options.per_node == 1 else with_status_of_ranks(["torchrun", "-m", "--", "widefield", *words])
    )


def _meeting(options: KubernetesJob, name: str) -> list[dict[str, Any]]:
    """PET_*, as Kubeflow sets them."""
    number = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    texts = {
        "PET_NNODES": options.nodes,
        "PET_NPROC_PER_NODE": options.per_node,
        "PET_MASTER_ADDR": f"{name}-0.{name}",
        "PET_MASTER_PORT": PORT,
    }
    return [
        *({"name": key, "value": str(value)} for key, value in texts.items()),
        {"name": "PET_NODE_RANK", "valueFrom": number},
    ]


def _environment(options: KubernetesJob) -> list[dict[str, Any]]:
    plain = [entry.partition("=") for entry in options.env]
    secrets = [re.split("[=:]", entry) for entry in options.secret]
    if options.per_node > 1 and PATIENCE not in {name for name, *_ in [*plain, *secrets]}:
        plain.append((PATIENCE, "=", str(patience(options.grace))))
    return [
        *({"name": name, "value": value} for name, _, value in plain),
        *({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}} for name, secret, key in secrets),
    ]


def _resources(options: KubernetesJob) -> dict[str, Any]:
    asked = {"cpu": options.cpus, "memory": options.memory, options.gpu_resource: options.gpus}
    given = {name: str(value) for name, value in asked.items() if value is not None}
    return {"requests": given, "limits": given} if given else {}


def _where(options: KubernetesJob) -> dict[str, Any]:
    labels = dict(entry.split("=", 1) for entry in options.node_selector)
    return {"nodeSelector": labels} if labels else {}


def _claims(options: KubernetesJob) -> list[tuple[str, str, str]]:
    """(name of the volume, claim, mount)."""
    return [(f"volume-{number}", *entry.split(":", 1)) for number, entry in enumerate(options.volume)]


def _mounts(command: TrainCommand, options: KubernetesJob) -> list[dict[str, Any]]:
    recipe = [{"name": "recipe", "mountPath": str(PurePosixPath(RECIPE).parent), "readOnly": True}] * bool(command.text)
    claims = [{"name": name, "mountPath": path} for name, _, path in _claims(options)]
    return [{"name": "shared-memory", "mountPath": "/dev/shm"}, *recipe, *claims]


def _volumes(command: TrainCommand, options: KubernetesJob, name: str) -> list[dict[str, Any]]:
    """shared-memory: loaders' workers and NCCL need more than the 64 MiB that a container has."""
    recipe = [{"name": "recipe", "configMap": {"name": f"{name}-recipe"}}] * bool(command.text)
    claims = [{"name": volume, "persistentVolumeClaim": {"claimName": claim}} for volume, claim, _ in _claims(options)]
    return [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, *recipe, *claims]


JOB = KubernetesJob

_LEAST = {"image": "registry/widefield:1", "volume": ["claim:/runs"]}
JOBS: list[tuple[dict[str, Any], list[str] | str]] = [
    (
        {**_LEAST, "nodes": 2, "gpus": 8},
        [
            "kind: Job\n", "completionMode: Indexed\n", "completions: 2\n", "clusterIP: None\n", "nvidia.com/gpu: '8'\n",
            "- torchrun\n", "- sh\n    - -c\n", "SHUTDOWN_TIMEOUT\n          value: '280'\n",
            "kind: TrainJob\n", "numNodes: 2\n", "numProcPerNode: 8\n", "values:\n        - 75\n",
            "value: first-0.first\n", "kubectl apply --filename launch/first/job.yaml", "kind: ConfigMap\n", RECIPE,
        ],
    ),
    ({**_LEAST, "kind": "trainjob"}, ["--filename launch/first/trainjob.yaml", "command:\n    - widefield\n    - train\n"]),
    ({**_LEAST, "secret": ["WANDB_API_KEY=wandb:key"]}, ["secretKeyRef:\n              name: wandb\n              key: key\n"]),
    ({**_LEAST, "env": ["NCCL_DEBUG=INFO"], "cpus": 4, "memory": "8Gi"}, ["value: INFO\n", "memory: 8Gi\n", "cpu: '4'\n"]),
    ({**_LEAST, "namespace": "team", "node_selector": ["gpu=h1"]}, ["namespace: team\n", "nodeSelector:\n        gpu: h1\n"]),
    ({**_LEAST, "kind": "trainjob", "restarts": 5}, "--restarts 5 is for --kind job: a TrainJob restarts as often"),
    ({**_LEAST, "gpus": 2, "env": ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT=9"]}, ["SHUTDOWN_TIMEOUT\n          value: '9'\n"]),
    ({**_LEAST, "nodes": 2}, ["backoffLimit: 6\n", "command:\n        - widefield\n"]),
    ({"volume": ["claim:/runs"]}, "pods need an image with widefield in it"),
    ({"image": "x"}, "the run folder /runs/first is in no volume (mounted: none)"),
    ({**_LEAST, "volume": ["claim:/data"]}, "is in no volume (mounted: /data)"),
    ({**_LEAST, "volume": ["claim"]}, "number 1 has another form; write CLAIM:/PATH"),
    ({**_LEAST, "env": ["API_TOKEN=abc"]}, "API_TOKEN is a secret by its name"),
    ({**_LEAST, "env": ["PET_NNODES=3"]}, "PET_NNODES is set by the job itself"),
    ({**_LEAST, "secret": ["A=b"]}, "write NAME=SECRET:KEY"),
    ({**_LEAST, "name": "My_Job"}, "'My_Job' is no name for a job of Kubernetes"),
    ({**_LEAST, "kind": "pod"}, "'kind' is 'pod'"),
]  # fmt: skip
