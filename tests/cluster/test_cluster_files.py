"""The files of `cluster/`, as far as they can be held to something without a cluster: schemas, names, one truth."""

import importlib
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from rlvlm.core.guests import guests
from rlvlm.envs.rendering import FIX
from rlvlm.runs.settings.arguments import parse_run
from rlvlm.runs.start.placement import Node, layout_of
from rlvlm.serving.app_file import JudgeAppArgs, read_app_file
from rlvlm.sweeps.config import find_sweep_file, read_sweep
from rlvlm.sweeps.plan import expand, shared_judges

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
RAY_VERSION = re.search("^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)[1]  # pyright: ignore
OF_OPENVLA = pytest.mark.skipif("openvla" not in guests(), reason="the guest openvla was taken out")


def read(name: str) -> Any:
    return yaml.safe_load((CLUSTER / name).read_text())


def test_ray_up_takes_the_cluster_file() -> None:
    config = prepare_config(read("ray-cluster.yaml"))
    validate_config(config)
    assert config["head_node_type"] == "head"
    judge = config["available_node_types"]["judge"]
    assert judge["resources"]["GPU"] == 1 and judge["min_workers"] == 0
    options = " ".join(config["docker"]["run_options"])
    token = re.search("RAY_AUTH_TOKEN_PATH=(\\S+)", options)
    assert "RAY_AUTH_MODE=token" in options and token and token[1] in config["file_mounts"]
    (start,) = [line for line in config["head_start_ray_commands"] if "ray start" in line]
    assert "--dashboard-host=127.0.0.1" in start


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@pytest.mark.parametrize(
    ("name", "kind", "field"),
    [
        ("kuberay/rayjob.yaml", "RayJob", "rayClusterSpec"),
        ("kuberay/rayjob-vla.yaml", "RayJob", "rayClusterSpec"),
        ("kuberay/rayjob-sweep.yaml", "RayJob", "rayClusterSpec"),
        ("kuberay/rayservice.yaml", "RayService", "rayClusterConfig"),
    ],
)
def test_a_kuberay_file_is_whole(name: str, kind: str, field: str) -> None:
    file = read(name)
    assert (file["apiVersion"], file["kind"]) == ("ray.io/v1", kind)
    cluster = file["spec"][field]
    assert cluster["rayVersion"] == RAY_VERSION and cluster["authOptions"] == {"mode": "token"}
    assert all(isinstance(value, str) for value in cluster["headGroupSpec"]["rayStartParams"].values())
    for pod in pods(cluster):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            assert container["image"].startswith("rlvlm:")
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    assert pods(cluster)[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] >= 1


def test_the_ray_jobs_command_is_one_that_rlvlm_takes() -> None:
    shell, flag, script = shlex.split(read("kuberay/rayjob.yaml")["spec"]["entrypoint"])
    assert (shell, flag) == ("sh", "-c")
    resume, run = (shlex.split(part.strip()) for part in script.split("exec ")[1:])
    assert resume[:2] == ["rlvlm", "resume"]
    config = parse_run(run[2:], "rlvlm run").config
    assert str(config.out) == resume[2].rstrip(";")
    assert config.serve.num_gpus == 1 and config.judge.backend == "transformers"


@OF_OPENVLA
def test_a_large_policys_job_has_a_place_for_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    job = read("kuberay/rayjob-vla.yaml")["spec"]
    *_, script = shlex.split(job["entrypoint"])
    resume, run = (shlex.split(part.strip()) for part in script.split("exec ")[1:])
    config = parse_run(run[2:], "rlvlm run").config
    assert str(config.out) == resume[2].rstrip(";")
    monkeypatch.setenv("RAY_ADDRESS", "of the cluster")
    limits = pods(job["rayClusterSpec"])[1]["containers"][0]["resources"]["limits"]
    worker = Node(name="worker", cpus=float(limits["cpu"]), gpus=[1.0] * limits["nvidia.com/gpu"])
    layout = layout_of(config, [Node(name="head", cpus=0.0, is_own=True), worker], is_here=False)
    assert layout.where["learners"] == layout.where["env runners"] == ["worker"] * 4 and layout.own_share == 0
    assert read("ray-cluster.yaml")["available_node_types"]["learner"]["resources"]["GPU"] == limits["nvidia.com/gpu"]


@OF_OPENVLA
def test_the_sweeps_job_runs_goes_on_and_reports_in_one_folder_with_a_gpu_for_each_of_its_judges() -> None:
    file = read("kuberay/rayjob-sweep.yaml")["spec"]
    shell, flag, script = shlex.split(file["entrypoint"])
    assert (shell, flag) == ("sh", "-c")
    commands = [shlex.split(part) for part in re.findall(r"rlvlm [^;]*", script)]
    assert [words[1] for words in commands] == ["resume", "sweep", "report"]
    assert {words[-1] for words in commands} == {"/runs/libero_rewards"}
    sweep = read_sweep(find_sweep_file(commands[1][2]))
    judges = shared_judges(expand(sweep), 1.0, Path("/runs/libero_rewards")).values()
    (group,) = file["rayClusterSpec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] * group["replicas"] >= sum(judge.serve.num_gpus for judge in judges) + 1
    mounts = {one["mountPath"] for one in group["template"]["spec"]["containers"][0]["volumeMounts"]}
    assert str(Path(sweep.settings["policy.model"]).parent) in mounts


def test_the_ray_service_serves_the_app_of_serve_apps() -> None:
    service = yaml.safe_load(read("kuberay/rayservice.yaml")["spec"]["serveConfigV2"])
    ServeDeploySchema.model_validate(service)
    ours = yaml.safe_load((ROOT / "serve_apps" / "qwen3vl_8b_nf4.yaml").read_text())["applications"]
    judge, gateway = service["applications"]
    assert judge == ours[0]
    JudgeAppArgs.model_validate(judge["args"])
    assert gateway["args"]["http"] | {"token_file": "", "hosts": []} == ours[1]["args"]["http"] | {
        "token_file": "",
        "hosts": [],
    }
    for app in (judge, gateway):
        module, _, name = app["import_path"].partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_the_ray_services_app_passes_rlvlms_own_checks(tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    file.write_text(read("kuberay/rayservice.yaml")["spec"]["serveConfigV2"])
    assert not read_app_file(file).is_loopback


def test_all_images_can_draw_and_have_the_tested_versions() -> None:
    packages = FIX.split("-y ")[1].split()
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].split(",")[0][2:]
    for name in ("Dockerfile", "rlvlm.def"):
        text = (CLUSTER / name).read_text()
        assert all(re.search(rf"\b{package}\b", text) for package in packages), name
        assert f"python:{python}-" in text and "--constraint constraints.txt" in text
        assert "/usr/share/glvnd/egl_vendor.d/10_nvidia.json" in text


def test_all_that_goes_into_an_image_is_there() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", (CLUSTER / "Dockerfile").read_text(), re.M)
    sources = {word for line in copied for word in line.split()}
    files = (CLUSTER / "rlvlm.def").read_text().partition("%files\n")[2].partition("\n\n")[0]
    assert {line.split()[0] for line in files.splitlines()} == sources
    assert all((ROOT / source).exists() for source in sources)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == sources
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, packed = settings["project"], settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {project["readme"], *project["license-files"], *packed["packages"], *packed["force-include"]}
    assert needed <= sources, "what the build reads is in the image, the licence too"
    for name in ("Dockerfile", "rlvlm.def"):
        assert set(re.findall(r"rlvlm:(\d\S+)", (CLUSTER / name).read_text())) == {project["version"]}
