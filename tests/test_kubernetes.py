"""The Kubernetes manifests have fields that Kubernetes knows, and agree with the image and the server."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from deployment import ROOT, find, image_environment
from jsonschema_rs import Draft202012Validator

from core.cache_folder import user_cache_folder
from entrypoints.api_keys import KEY_VARIABLE
from entrypoints.serve import FLUSH_SECONDS
from entrypoints.serve_args import parse_options

# Of Kubernetes 1.37, as in kubernetes-validate 1.37.0 (Apache License 2.0), without descriptions, what servers fill in,
# and volumes that are not used here; fields that are not in it are refused.
SCHEMA: dict[str, Any] = json.loads((ROOT / "tests" / "kubernetes_schema.json").read_text())
KINDS = {"Deployment": "io.k8s.api.apps.v1.Deployment", "Service": "io.k8s.api.core.v1.Service"}
PROCESS_SECONDS = 10.0  # to end processes that did not leave by themselves


def manifests() -> dict[str, Any]:
    """Kind -> manifest."""
    return {each["kind"]: each for each in yaml.safe_load_all((ROOT / "deploy/kubernetes/stencil.yaml").read_text())}


def container() -> dict[str, Any]:
    (found,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found


def errors(manifest: dict[str, Any]) -> list[str]:
    schema = SCHEMA | {"$ref": f"#/$defs/{KINDS[manifest['kind']]}"}
    return [error.message for error in Draft202012Validator(schema).iter_errors(manifest)]


@pytest.mark.parametrize("kind", KINDS)
def test_kubernetes_knows_every_field(kind: str) -> None:
    manifest = manifests()[kind]
    assert errors(manifest) == []
    manifest["spec"]["slector"] = {}
    assert errors(manifest)


def test_the_schema_refuses_what_a_probe_cannot_have() -> None:
    manifest = manifests()["Deployment"]
    (found,) = manifest["spec"]["template"]["spec"]["containers"]
    for wrong in ({"httpGet": {"path": "/ready"}}, {"httpGet": {"port": 1, "url": "/"}}, {"periodSeconds": "5"}):
        found["readinessProbe"] = wrong
        assert errors(manifest), wrong


def test_the_service_finds_the_pods_and_their_port() -> None:
    deployment, service = (manifests()[kind]["spec"] for kind in ("Deployment", "Service"))
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert service["selector"].items() <= labels.items()
    (port,), (served,) = container()["ports"], service["ports"]
    assert served["targetPort"] == port["name"]
    assert port["containerPort"] == parse_options(container()["args"]).port
    (expose,) = find("EXPOSE")
    assert expose.words == [str(port["containerPort"])]
    annotations = deployment["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"])


def test_probes_ask_for_what_they_are_for() -> None:
    paths = {name: container()[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}


def test_a_pod_is_given_time_to_drain() -> None:
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    command, seconds = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    drain = parse_options(container()["args"]).config.engine.drain_seconds
    assert pod["terminationGracePeriodSeconds"] >= float(seconds) + drain + FLUSH_SECONDS + PROCESS_SECONDS
    probe = container()["readinessProbe"]
    assert float(seconds) >= probe["periodSeconds"], "proxies are told of a pod that ends before it is asked again"


def test_what_may_be_written_is_a_volume_of_the_images_user() -> None:
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    mounts = {each["mountPath"]: each["name"] for each in container()["volumeMounts"]}
    assert {*mounts} == {str(user_cache_folder(image_environment()).parent), "/tmp"}
    assert {*mounts.values()} == {each["name"] for each in pod["volumes"]}
    (user,) = find("USER")
    assert user.arguments == f"{pod['securityContext']['fsGroup']}:{pod['securityContext']['fsGroup']}"
    assert [each["name"] for each in container()["env"]] == [KEY_VARIABLE]
