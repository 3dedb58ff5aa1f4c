"""What lies in `deploy/` runs as far as it can here: every command that it names is one of ours, with our options."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.commands import _mistake, make_parser
from slipstream.cli.fleet.tasks import Task
from slipstream.engine_cache.travel.remote_store import RemoteStore
from slipstream.tests.unit.cli.fleet.conftest import PRETENDING, builds

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


def parsed(words: list[str]) -> Any:
    """The options of a command line; fails where it is wrong."""
    options = make_parser().parse_args(words)
    assert _mistake(options) is None
    return options


def test_the_readme_says_what_each_file_is_for_and_how_to_run_it() -> None:
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in DEPLOY.iterdir() if path.is_file()} - {"README.md"}
    assert set(re.findall(r"^\| `(\S+)` \|", text, re.MULTILINE)) == files
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    ours = re.findall(r"^python custom_nodes/slipstream (.+?)(?:\s+#.*)?$", blocks, re.MULTILINE)
    assert [parsed(shlex.split(words)).action for words in ours] == ["export-key", "show"]
    named = {path for path in re.findall(r"deploy/[\w.-]+", blocks) if not (DEPLOY.parent / path).is_file()}
    assert not named and re.search(r"^docker build ", blocks, re.MULTILINE)
    job = (DEPLOY / "kubernetes-job.yaml").read_text(encoding="utf-8")
    made = re.findall(r"kubectl create (?:secret generic|configmap) (\S+)", blocks)
    assert sorted(made) == sorted(re.findall(r"(?:secretName|secretRef: \{name|configMap: \{name): ([\w-]+)", job))
    app = (DEPLOY / "modal_app.py").read_text(encoding="utf-8")
    assert re.findall(r"modal secret create (\S+)", blocks) == re.findall(r'Secret\.from_name\("([\w-]+)"\)', app)
    assert "SLIPSTREAM_SECRET_KEY" in app and "store.key=slipstream.key" in blocks


def test_what_is_called_measured_has_a_command() -> None:
    text = (DEPLOY.parent / "docs" / "scaling.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\|(.+)\|(.+)\|(.+)\|$", text.partition("## Measured parts")[2].partition("##")[0], re.MULTILINE
    )
    commands = {command.strip() for _, _, command in rows[2:]}
    assert len(rows) > 5 and all(command.startswith(("`python ", "[these](speed.md#")) for command in commands)
    files = [word for command in commands for word in command.strip("`").split() if word.endswith(".py")]
    assert len(files) >= 4 and all((DEPLOY.parent / file).is_file() for file in files)


def test_the_commands_of_the_dockerfile() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"python (?:\.|/app/ComfyUI/custom_nodes/slipstream) ([^&>\n]+)", text)
    assert len(commands) == 5
    options = [parsed(shlex.split(command)) for command in commands]
    assert [each.command[1] for each in options] == ["trust", "build", "export_engines", "trust", "trust"]
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", text, re.MULTILINE)
    assert [name for _, name in stages] == ["engines", ""] and "COPY --from=engines /engines /engines" in text
    assert "slipstream_key" in text and "rm -rf /tmp/slipstream-keys" in text, "the secret stays in no layer"
    served = text.rpartition("FROM ")[2]
    assert "SLIPSTREAM_KEYS=/etc/slipstream" in served and "chmod -R a+rX /engines /etc/slipstream" in served
    names = set(re.findall(r"\b(SLIPSTREAM_[A-Z]+)=", text))
    assert names <= {"SLIPSTREAM_KEYS", "SLIPSTREAM_BASE", "SLIPSTREAM_WORKER"}


def test_the_image_s_steps_make_engines_that_a_container_serves(cli, tmp_path: Path, monkeypatch) -> None:
    """Import the key, export a folder, trust its public key, and use it as a base: as the Dockerfile does.

    The user of the container may only read.
    """
    from slipstream.core.protocols import Artifact
    from slipstream.engine_cache import BuildRecord, EngineStore, Keyring
    from slipstream.engine_cache.keyring import FOLDER_VARIABLE
    from slipstream.tests.unit.cli.support import current_key

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "engine.bin").write_bytes(b"x" * 100)
    secret = Keyring(tmp_path / "maker").export_secret()
    (tmp_path / "key").write_text(secret)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "build-stage"))
    assert cli("trust", "import-key", tmp_path / "key").status == 0
    builder = EngineStore(tmp_path / "store")
    entry = builder.put(current_key(), Artifact(tmp_path / "a", ("engine.bin",)), label="x", build=BuildRecord(1.0))
    assert cli("export", tmp_path / "engines", "--folder").status == 0
    public = cli("trust", "show").out.strip()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "container"))
    assert cli("trust", "add", public, "--name", "this image").status == 0
    assert not [path for path in (tmp_path / "container").rglob("*") if path.name.endswith(".key")], "no secret is made"
    (tmp_path / "container").chmod(0o555)
    found = EngineStore(tmp_path / "fresh", bases=[tmp_path / "engines"]).lookup(entry.digest)
    assert found is not None and found.artifact.files == ("engine.bin",)


def test_the_matrix() -> None:
    pytest.importorskip("yaml")
    from slipstream.cli.fleet.matrix import read_matrix

    (task,) = read_matrix(DEPLOY / "models.yaml")
    assert isinstance(task, Task) and parsed(
        ["build", "--model", task.model, "--resolution", task.resolution, *task.words]
    )


def test_the_job() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((DEPLOY / "kubernetes-job.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][:2] == ["python", "."] and parsed(container["command"][2:])
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert pod["restartPolicy"] == "Never" and container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2] and rule["onExitCodes"]["containerName"] == container["name"]


def test_the_function_builds_and_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "pretended"
    folder.mkdir()
    monkeypatch.setenv("PRETENDED", str(folder))
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "store"))
    module = runpy.run_path(str(DEPLOY / "modal_app.py"))
    url = str(tmp_path / "remote")
    found = module["build"]("one", "64x64", url, str(PRETENDING))
    assert builds(folder) == 1 and [engine["digest"] for engine in found["engines"]] == RemoteStore(url).digests()
    with pytest.raises(RuntimeError, match="multiples of 8"):
        module["build"]("one", "65x64", url, str(PRETENDING))


def test_the_function_signs_by_the_key_of_its_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.engine_cache import Keyring
    from slipstream.engine_cache.keyring import FOLDER_VARIABLE

    maker = Keyring(tmp_path / "maker")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "container"))
    monkeypatch.setenv("SLIPSTREAM_SECRET_KEY", maker.export_secret() + "\n")
    module = runpy.run_path(str(DEPLOY / "modal_app.py"))
    module["take_key"](str(DEPLOY.parent))
    assert Keyring(tmp_path / "container").own_key() == maker.public_key()


@pytest.mark.slow
def test_modal_itself_takes_the_app() -> None:
    """It asks its own servers for nothing until the app runs."""
    modal = pytest.importorskip("modal", reason="no modal; `python tools/test.py --everything` installs it")
    module = runpy.run_path(str(DEPLOY / "modal_app.py"), run_name="modal_app")
    assert isinstance(module["app"], modal.App) and isinstance(module["remote_build"], modal.Function)


@pytest.mark.slow
def test_kubernetes_own_schema_takes_the_job() -> None:
    validation = pytest.importorskip(
        "kubernetes_validate", reason="no kubernetes-validate; `python tools/test.py --everything` installs it"
    )
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((DEPLOY / "kubernetes-job.yaml").read_text(encoding="utf-8"))
    validation.validate(job, validation.latest_version(), strict=True)
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises(validation.ValidationError):
        validation.validate(job, validation.latest_version(), strict=True)


def test_the_app_is_made_with_modals_own_words(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Against a stand-in of Modal: the function, its GPU and its entry point."""
    given: dict[str, Any] = {}

    class App:
        def __init__(self, name: str) -> None:
            given["name"] = name

        def function(self, **options: Any) -> Any:
            given.update(options)
            return lambda function: types.SimpleNamespace(
                starmap=lambda rows: [{"built": function.__name__, "row": row} for row in rows]
            )

        def local_entrypoint(self) -> Any:
            return lambda main: given.setdefault("main", main)

    image = types.SimpleNamespace(from_registry=lambda name: image, pip_install=lambda *names: image)
    secret = types.SimpleNamespace(from_name=lambda name: name)
    stand_in = types.SimpleNamespace(App=App, Image=image, Secret=secret)
    monkeypatch.setitem(sys.modules, "modal", stand_in)
    runpy.run_path(str(DEPLOY / "modal_app.py"))
    assert given["gpu"] == "H100" and given["retries"] == 2 and given["image"] is image
    given["main"](model="m", resolutions="64x64,128x64", remote="s3://b/e")
    rows = [json.loads(line)["row"] for line in capsys.readouterr().out.splitlines()]
    assert rows == [["m", "64x64", "s3://b/e"], ["m", "128x64", "s3://b/e"]]
