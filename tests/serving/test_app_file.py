import importlib
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from rlvlm.core.errors import UsageError
from rlvlm.serving.app_file import GatewayArgs, JudgeAppArgs, read_app_file

ROOT = Path(__file__).parents[2]
SERVE_APPS = sorted([*(ROOT / "serve_apps").glob("*.yaml"), *(ROOT / "rlvlm/plugins").glob("*/serve_apps/*.yaml")])
SMALL = """# About it.
http_options: {port: 9000}
applications:
  - {name: a, import_path: "rlvlm.serving.deployments:judge_app", args: {placement: {num_gpus: 0.5}}}
  - {name: a-http, import_path: "rlvlm.serving.ingress:gateway_app", args: {http: {judges: [a]}}}
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "small.yaml"
        path.write_text(text)
        return path

    return write


def test_a_file_defines_the_apps_and_their_places(write):
    file = read_app_file(write(SMALL))
    assert (file.name, file.about, file.gateway_app) == ("small", "About it.", "a-http")
    assert file.url == "http://127.0.0.1:9000"
    [judge] = file.judges
    assert (judge.app, judge.judge.backend, judge.resources) == ("a", "pocket", "1 CPU, 0.5 GPU")


@pytest.mark.parametrize("path", SERVE_APPS, ids=lambda path: path.stem)
def test_serve_deploy_reads_our_files_as_we_do(path):
    ours = read_app_file(path)
    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    assert ours.about and (schema.http_options.host, schema.http_options.port) == (ours.host, ours.port)
    judges = {entry.app: entry for entry in ours.judges}
    for application in schema.applications:
        module, name = application.import_path.split(":")
        build = getattr(importlib.import_module(module), name)
        if application.name == ours.gateway_app:
            args = GatewayArgs.model_validate(application.args)
            assert args.http == ours.http
        else:
            args, entry = JudgeAppArgs.model_validate(application.args), judges[application.name]
            assert (args.judge, args.placement) == (entry.judge, entry.placement)
            assert application.route_prefix is None, "a judge is reached through its handle alone"
        options = build(args)._bound_deployment.ray_actor_options
        assert options["num_cpus"] == (
            args.http.num_cpus if application.name == ours.gateway_app else args.placement.num_cpus
        )


def test_the_files_are_those_that_the_docs_name():
    docs = (ROOT / "docs/serving.md").read_text()
    assert SERVE_APPS and all(f"`{path.stem}`" in docs for path in SERVE_APPS)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("num_gpus: 0.5", "gpus: 1", "applications.0.args.placement.gpus: no such setting"),
        ("num_gpus: 0.5", "num_gpus: 1.5", "whole number"),
        ("num_gpus: 0.5", "num_gpus: many", "num_gpus: Input should be a valid number"),
        ("judges: [a]", "judges: [b]", r"not in the file: \['b'\]"),
        ("judges: [a]", "judges: []", "at least one Serve app"),
        ("judges: [a]", "token: secret", "args.http.token: no such setting"),
        ("rlvlm.serving.deployments:judge_app", "os:system", "does not match any of the expected tags"),
        ("http_options", "http_optons", "http_optons: no such setting"),
        ("applications", "!!python/object/apply:os.system [id]", "not YAML that can be read"),
        ("name: a,", "", "applications.0.name: Field required"),
        ("{port: 9000}", "{port: many}", "small.yaml: http_options.port: Input should be a valid integer"),
        ("{port: 9000}", "3", "small.yaml: http_options: Input should be a valid dictionary"),
        ("name: a,", "name: [a],", "small.yaml: applications.0.name: Input should be a valid string"),
    ],
)
def test_mistakes_in_a_file_are_named(write, old, new, reason):
    with pytest.raises(UsageError, match=reason):
        read_app_file(write(SMALL.replace(old, new)))


def test_options_override_the_file_and_other_machines_need_a_name(write):
    file = read_app_file(write(SMALL))
    changed = file.with_options(port=9100, media_root="/media", token_file="")
    assert (changed.url, changed.http.media_root, changed.http.token_file) == ("http://127.0.0.1:9100", "/media", "")
    with pytest.raises(UsageError, match="needs the names"):
        file.with_options(host="0.0.0.0")
    assert not file.with_options(host="0.0.0.0", hosts=("gpu7",)).is_loopback
    with pytest.raises(UsageError, match="absolute"):
        file.with_options(media_root="media")
    with pytest.raises(UsageError, match="65535"):
        file.with_options(port=70_000)


@pytest.mark.parametrize("value", ["3", "null", "a", "{a: 1}", "[3]", "[[]]"])
def test_applications_of_another_kind_are_named_with_the_file(write, value):
    with pytest.raises(UsageError, match="small.yaml: "):
        read_app_file(write(f"applications: {value}\n"))
