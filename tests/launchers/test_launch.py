"""`widefield launch`: the job is what its options say, its recipe and plan are checked first, and it holds no secret."""

from __future__ import annotations

import doctest
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command import DIGITS

import widefield as wf
from widefield.cli import main
from widefield.launchers import _job
from widefield.launchers._job import Allocation, JobFiles, TrainCommand
from widefield.launching import launchers
from widefield.planner.machines.cluster_text import cluster_of
from widefield.plans import Plan, links
from widefield.plans.links import axes_between_machines, slow_links
from widefield.section import parse_section, text_of

COMMAND = TrainCommand("my.yaml", ("optimizer.lr=0.2",), Path("/runs/first"), text="model: {name: resnet}\n")
CASES = [
    pytest.param(name, options, expected, id=f"{name}-{number}")
    for name, module in launchers().items()
    for number, (options, expected) in enumerate(module.JOBS)
]
POD = ["kubernetes", DIGITS, "--image", "x", "--volume", "claim:/runs", "--run", "/runs/first"]


def written(launcher: str, /, **options) -> JobFiles:
    module = launchers()[launcher]
    asked: Allocation = parse_section(module.JOB, text_of(options, name="the options"), name="the options")
    assert [*asked.variants()] and asked.ranks >= 0
    return module.write(COMMAND, asked)


def text_in(job: JobFiles) -> str:
    commands = [*job.submit, *(words for _, words in job.on_hosts), *((line,) for _, line in job.by_hand)]
    return "\n".join([*job.files.values(), *(" ".join(words) for words in commands)])


def said(capsys, *arguments: str, status: int = 0) -> str:
    assert main(["launch", *arguments]) == status
    captured = capsys.readouterr()
    return captured.out + captured.err


def program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(stat.S_IRWXU)


# ------------------------------------------------------------------------------------------------ what is written


@pytest.mark.parametrize(("name", "options", "expected"), CASES)
def test_a_job_has_what_its_options_ask_for_or_they_are_refused_in_words(name, options, expected):
    if isinstance(expected, str):
        with pytest.raises(ValueError) as refused:
            written(name, **options)
        assert expected in str(refused.value)
    else:
        text = text_in(written(name, **options))
        assert [part for part in expected if part not in text] == [], text


def test_three_launchers_write_jobs_and_every_option_is_explained():
    assert list(launchers()) == ["kubernetes", "slurm", "torchrun"]
    for module in launchers().values():
        assert module.JOBS and all(field.description for field in module.JOB.model_fields.values())


def test_examples_in_docstrings_hold():
    for module in (_job, links):
        found = doctest.testmod(module, extraglobs={"Plan": Plan})
        assert found.attempted and not found.failed


@pytest.mark.parametrize("options", [{}, {"array": ["seed=1,2"]}, {"setup": ["true"], "container": "a b.sif"}])
def test_a_batch_script_is_one_that_bash_takes_and_its_words_arrive_as_they_are(options, tmp_path):
    """srun is a program that prints its words; scontrol too: the job is queued again where the ranks say so, else not, and
    not where it is being cancelled."""
    odd = TrainCommand("my recipe.yaml", ("a='$HOME'", "b=[1, 2]"), Path("runs/a b"), here=tmp_path)
    module = launchers()["slurm"]
    (script,) = module.write(odd, module.JOB(**options)).files.values()
    folder = tmp_path / "runs" / "a b" / ("seed=2" if "array" in options else "")
    folder.mkdir(parents=True)
    for status, state, is_stopped, is_requeued in [
        (0, "RUNNING", False, False),
        (75, "RUNNING", False, True),
        (75, "COMPLETING", True, False),
        (143, "RUNNING", False, True),  # asked to stop while the ranks loaded
        (138, "RUNNING", False, True),
        (1, "RUNNING", False, False),
        (137, "RUNNING", True, True),
        (2, "RUNNING", True, False),
    ]:
        (folder / "stopped.json").unlink(missing_ok=True)
        done = ran(script, folder, tmp_path, ends=status, state=state, during='> "$RUN/stopped.json"' * is_stopped)
        lines = done.stdout.splitlines()
        assert (done.returncode, done.stderr) == (status, "")
        assert ("scontrol requeue 7" in lines) == is_requeued, (status, state, is_stopped)
        assert lines[lines.index("train") :][:4] == ["train", "my recipe.yaml", "a='$HOME'", "b=[1, 2]"]
        assert lines[lines.index("--run-dir") + 1] == str(folder.relative_to(tmp_path))


def ran(script: str, folder: Path, place: Path, *, ends: int, state: str = "RUNNING", during: str = "", **about: str):
    """The batch script, where srun does `during` and ends with a status, and scontrol and squeue say how the job is."""
    program(place, "srun", f'printf "%s\\n" "$@"; {during or ":"}; exit {ends}')
    program(place, "scontrol", 'if [ "$1" = show ]; then echo "JobId=7 Reason=$REASON"; else echo "scontrol $*"; fi')
    program(place, "squeue", f"echo {state}")
    environment = {"PATH": f"{place}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "RUN": str(folder)}
    return subprocess.run(
        ["bash"], input=script, env=environment | about, cwd=place, capture_output=True, text=True, timeout=60
    )


def batch_script(place: Path, **options) -> tuple[str, Path]:
    """A batch script, and its run folder."""
    (place / "run").mkdir()
    module = launchers()["slurm"]
    (script,) = module.write(TrainCommand("r.yaml", run=Path("run"), here=place), module.JOB(**options)).files.values()
    return script, place / "run"


@pytest.mark.alone
@pytest.mark.parametrize(
    ("reason", "requeue", "before_the_end"),
    [("TimeLimit", True, True), ("TimeLimit", False, False), ("None", True, False)],
    ids=["limit", "no_requeue", "preemption"],
)
def test_a_job_whose_time_is_over_before_its_ranks_have_saved_is_queued_again_at_once(
    reason, requeue, before_the_end, tmp_path
):
    """Slurm sends SIGTERM to the script and kills it before srun has ended, and nobody queues it again after that.
    At a preemption there is time, and a requeue would end it."""
    script, folder = batch_script(tmp_path, requeue=requeue)
    done = ran(script, folder, tmp_path, ends=0, during="kill -TERM $PPID; sleep 2; echo saved", REASON=reason)
    lines = [line for line in done.stdout.splitlines() if line in ("scontrol requeue 7", "saved")]
    assert lines == ["scontrol requeue 7"] * before_the_end + ["saved"], done.stdout
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stop_of_an_earlier_start_queues_no_job_again(tmp_path):
    script, folder = batch_script(tmp_path)
    (folder / "stopped.json").write_text("{}")
    assert "scontrol requeue" not in ran(script, folder, tmp_path, ends=1).stdout
    written = 'printf "{}" > "$RUN/new"; mv "$RUN/new" "$RUN/stopped.json"'
    assert "scontrol requeue 7\n" in ran(script, folder, tmp_path, ends=1, during=written).stdout


@pytest.mark.parametrize(
    ("status", "count", "is_requeued"), [(1, "", True), (137, "1", True), (1, "2", False), (2, "", False), (0, "", False)]
)
def test_a_job_whose_ranks_failed_is_queued_again_as_often_as_it_asks(status, count, is_requeued, tmp_path):
    script, folder = batch_script(tmp_path, restarts=2)
    about = {"SLURM_RESTART_COUNT": count} if count else {}
    assert ("scontrol requeue 7" in ran(script, folder, tmp_path, ends=status, **about).stdout) == is_requeued


def test_a_container_has_the_folders_of_the_run_and_of_the_recipe(tmp_path):
    def mounts(run: str, recipe: str, *mount: str) -> list[str]:
        command = TrainCommand(recipe, run=Path(run), text="model: {}", here=Path("/work"))
        module = launchers()["slurm"]
        (script,) = module.write(command, module.JOB(container="x.sif", mount=list(mount))).files.values()
        return script.partition("--bind ")[2].split()[0].split(",")

    assert mounts("runs/1", "recipes/a.yaml") == ["/work:/work"]
    assert mounts("/scratch/1", "/home/a.yaml") == ["/work:/work", "/scratch/1:/scratch/1", "/home:/home"]
    assert mounts("/scratch/1", "a.yaml", "/disk:/scratch:rw") == ["/work:/work", "/disk:/scratch:rw"]
    assert mounts("../runs/1", "a.yaml") == ["/work:/work", "/runs/1:/runs/1"]


# ------------------------------------------------------------------------------------------------ manifests


def documents(job: JobFiles, kind: str) -> list[dict]:
    (text,) = (text for path, text in job.files.items() if path.name == f"{kind}.yaml")
    return list(yaml.safe_load_all(text))


FULL = {
    "image": "x:1", "volume": ["claim:/runs", "data:/data"], "nodes": 2, "gpus": 8, "cpus": 16, "memory": "200Gi",
    "namespace": "team", "node_selector": ["gpu=h100"], "env": ["NCCL_DEBUG=INFO"], "secret": ["KEY=wandb:key"],
}  # fmt: skip
LEAST = {"image": "x:1", "volume": ["claim:/runs"]}


@pytest.mark.parametrize("options", [FULL, LEAST], ids=["full", "least"])
def test_the_job_and_its_service_are_valid_by_the_published_schemas_of_kubernetes(options):
    """Strict: a key that the schema does not have is an error.  Of the newest version, and one of two years before."""
    import kubernetes_validate

    found = documents(written("kubernetes", **options), "job")
    assert [one["kind"] for one in found] == ["ConfigMap", "Service", "Job"]
    for version in ("1.31", kubernetes_validate.latest_version()):
        for one in found:
            kubernetes_validate.validate(one, version, strict=True)
    found[-1]["spec"]["template"]["spec"]["containers"][0]["comand"] = ["typo"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found[-1], "1.31", strict=True)


@pytest.mark.parametrize("options", [FULL, LEAST], ids=["full", "least"])
def test_the_trainjob_is_what_kubeflows_published_models_take(options):
    """They drop what they do not know, so what comes back is compared."""
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    (_, job) = documents(written("kubernetes", **options), "trainjob")
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    job["spec"]["numNodes"] = 2
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() != job


def test_the_pods_of_a_job_find_each_other_by_what_kubernetes_py_reads():
    (*_, job) = documents(written("kubernetes", **{**LEAST, "nodes": 2}), "job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {one["name"]: one.get("value", "1") for one in container["env"]}
    world = launchers()["kubernetes"].detect(environment)
    assert (world.rank, world.size, world.address, world.port) == (1, 2, "first-0.first", 29500)
    assert pod["subdomain"] == "first" and container["command"][:2] == ["widefield", "train"]


# ------------------------------------------------------------------------------------------------ what is checked first


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["slurm", "digitz"], "no recipe at digitz; did you mean 'digits'"),
        (["slurm", DIGITS, "optimiser.lr=1"], "unknown key 'optimiser'; did you mean 'optimizer'"),
        (["slurm", DIGITS, "--nodes", "3", "mesh.replicate=2"], "needs 2 ranks and there are 3; set mesh.replicate=3"),
        (["slurm", DIGITS, "--array", "seed=1,two"], "'seed' is 'two' (str)"),
        (["slurm", DIGITS, "--array", "mesh.replicate=1,2", "--nodes", "2"], "needs 1 ranks and there are 2"),
        (["slurm", DIGITS, "--time", "noon"], "that is no time; write HH:MM:SS"),
        (
            ["slurm", DIGITS, "data.path=s3://me:hunter2@host/x"],
            "put a secret into a file of the job: data.path=s3://***@host/x",
        ),
        (["slurm", DIGITS, "data.options.api_key=hunter2"], "put a secret into a file of the job: data.options.api_key=***"),
        (["slurm", DIGITS, "--setup", "curl https://a:hunter2@b"], "put a secret into a file of the job: curl https://***@b"),
        ([*POD, "--env", "HF_TOKEN=hunter2"], "HF_TOKEN is a secret by its name"),
        (["torchrun", DIGITS, "mesh.replicate=2", "--hosts", "a,b,c"], "needs 2 ranks and there are 3"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = said(capsys, *arguments, status=2)
    assert words in text and "hunter2" not in text and list(tmp_path.iterdir()) == []


def test_a_recipe_with_a_password_goes_into_no_manifest(tmp_path, capsys):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: {name: resnet}\ndata: {name: digits, path: 'https://me:hunter2@host/x'}\n")
    text = said(capsys, "kubernetes", str(recipe), *POD[2:], "--dry-run", status=2)
    assert "https://***@host/x" in text and "hunter2" not in text


def test_a_dry_run_prints_all_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = said(capsys, "slurm", DIGITS, "--nodes", "2", "--gpus", "2", "mesh.space=[4]", "--dry-run")
    assert (
        "#SBATCH --gpus-per-node=2\n" in text and "plan: space=[4]" in text and "sbatch --parsable runs/0001/launch/job" in text
    )
    assert "note: mesh.space=[4] is on several machines of 2 ranks each, so the edges of tiles go between machines" in text
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_is_chosen_later_is_said_to_be_unchecked_and_what_would_be_refused_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["slurm", DIGITS, "mesh.auto=true", "--nodes", "2", "--dry-run"]
    text = said(capsys, *asked, "--gpus", "4")
    assert "note: mesh.auto=true: the plan is not checked here" in text and "--cluster 2x4xH100" in text
    (note,) = wf.launch("slurm", DIGITS, "mesh.auto=true", nodes=2, ranks_per_node=3, dry_run=True).notes
    cluster_of(re.findall(r"--cluster (\S+),", note)[0])
    assert "chooses recompute and stream too" in said(capsys, *asked, "recompute={}", status=2)
    assert "data.batch_size=auto a batch for a plan" in said(capsys, *asked, "data.batch_size=auto", status=2)


# ------------------------------------------------------------------------------------------------ submitting


@pytest.fixture
def bin(tmp_path, monkeypatch) -> Path:
    """A folder in which all programs are, and the test's own folder to be in."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "bin"


def test_a_job_is_written_beside_its_run_and_submitted_from_python_too(bin):
    program(bin, "sbatch", 'test -f "$2" && echo 123')
    done = wf.launch("slurm", "digits", "seed=3", nodes=2)
    assert (done.output, done.run, done.status) == ("123", Path("runs/0001"), 0)
    assert (done.run / "launch" / "job.sbatch").read_text() == next(iter(done.job.files.values()))
    assert wf.launch("slurm", "digits", dry_run=True).run == Path("runs/0002")


def test_what_submits_and_fails_or_is_not_there_is_said(bin, capsys):
    assert "sbatch is not on this machine" in said(capsys, "slurm", "digits", status=2)
    assert not Path("runs").exists()
    program(bin, "sbatch", "echo 'sbatch: error: invalid partition, see http://u:hunter2@x' >&2; exit 1")
    text = said(capsys, "slurm", "digits", status=2)
    assert "failed with status 1: sbatch: error: invalid partition" in text and "hunter2" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("slurn", {}), "no launcher 'slurn' writes jobs; did you mean 'slurm'?"),
        (("slurm", {"node": 2}), "a job of slurm has no node; did you mean 'nodes'?"),
        (("slurm", {"nodes": "2"}), "'nodes' is '2' (str)"),
        (("mpi", {}), "no launcher 'mpi' writes jobs"),
    ],
)
def test_from_python_wrong_names_and_types_are_refused(arguments, words):
    name, options = arguments
    with pytest.raises(ValueError) as refused:
        wf.launch(name, "digits", dry_run=True, **options)
    assert words in str(refused.value)


def test_commands_by_hand_are_printed_and_nothing_runs(bin, capsys):
    text = said(capsys, "torchrun", "digits", "--hosts", "a,b", "--ranks-per-node", "2", "--run", "runs/x")
    assert text.count(" --nnodes=2 --nproc-per-node=2") == 2 and "on b:\n  cd " in text
    again = said(capsys, "torchrun", "digits", "--hosts", "a,b", "--ranks-per-node", "2", "--run", "runs/x")
    (job,), (other,) = ({*re.findall("torch.distributed.run --rdzv-id=([0-9a-f]{8}) ", each)} for each in (text, again))
    assert job != other  # the same on all hosts of a start


@pytest.mark.alone
def test_over_ssh_all_hosts_run_at_once_and_one_that_fails_ends_the_others(bin, capfd, monkeypatch):
    """ssh is a program that runs its line here, or fails on host b."""
    from widefield.launchers import _together

    monkeypatch.setattr(_together, "AFTER_FAILURE_SECONDS", 0.5)
    program(bin, "ssh", 'for word; do :; done; [ "$5" = b ] && exit 7; echo "line: ${word:0:3}"; exec /bin/sleep 60')
    done = wf.launch("torchrun", "digits", hosts="a,b", run="runs/x", run_by="ssh")
    told = capfd.readouterr()
    assert done.status == 7 and "[a] line: cd" in told.out
    assert "the command of b ended with status 7; its output is above" in told.err


# ------------------------------------------------------------------------------------------------ axes and links


@pytest.mark.parametrize(
    ("plan", "each", "axes"),
    [
        (Plan(replicate=4, space=[2, 2]), 8, ["replicate"]),
        (Plan(replicate=2, space=[2, 2]), 8, []),
        (Plan(space=[4, 4]), 8, ["space"]),
        (Plan(replicate=2, space=[3]), 2, ["replicate", "space"]),
        (Plan(shard=8, channel=2), 8, ["shard"]),
        (Plan(channel=4, stage=4), 8, ["channel"]),
    ],
)
def test_an_axis_is_between_machines_where_a_group_of_it_is(plan, each, axes):
    """Compared with the groups themselves: ranks that differ in one coordinate."""
    assert axes_between_machines(plan, each) == axes == by_groups(plan, each)


def by_groups(plan: Plan, each: int) -> list[str]:
    names, sizes = list(plan.axes), list(plan.axes.values())
    found = []
    for at, name in enumerate(names):
        inner = 1
        for size in sizes[at + 1 :]:
            inner *= size
        groups = {}
        for rank in range(plan.ranks):
            groups.setdefault((rank // (inner * sizes[at]), rank % inner), set()).add(rank // each)
        if any(len(machines) > 1 for machines in groups.values()):
            found.append(name)
    return found


def test_only_axes_that_meet_in_every_layer_are_noted():
    assert slow_links(Plan(replicate=4, shard=4), 2) == []
    (note,) = slow_links(Plan(replicate=2, channel=4), 2)
    assert note.startswith(
        "mesh.channel=4 is on several machines of 2 ranks each, so the results of every layer that is cut go"
    )
    assert note.endswith("it fits one machine where channel 4 divides 2")


def test_help_of_a_launcher_loads_no_torch():
    program = (
        "import sys; from widefield.cli import main\n"
        "try: main(['launch', 'slurm', '--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60).returncode == 0
