"""The manifests of Kubernetes: their values, and the schemas of the resources."""

import runpy
import subprocess
import sys

import pytest
import yaml

from tests.support.workflows import ROOT

RENDER = ROOT / "cluster/render.py"
IMAGE = f"registry.example/tilewright@sha256:{'0' * 64}"
VERSIONS = ("1.31", "1.35")


def rendered(*words):
    call = [sys.executable, str(RENDER), *words]
    return subprocess.run(call, capture_output=True, text=True)


def resources(*words):
    done = rendered("--image", IMAGE, *words)
    assert done.returncode == 0, done.stderr
    return {part["kind"]: part for part in yaml.safe_load_all(done.stdout)}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("words", [(), ("--gpus", "0", "--command", "smoke")])
def test_each_resource_fits_its_schema(version, words):
    validator = pytest.importorskip(
        "kubernetes_validate", reason="needs kubernetes-validate: make cluster"
    )
    found = resources(*words)
    assert set(found) == {"PersistentVolumeClaim", "NetworkPolicy", "Job"}
    for part in found.values():
        validator.validate(part, version, strict=True)
    broken = found["Job"] | {"spec": found["Job"]["spec"] | {"backofLimit": 1}}
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, version, strict=True)


def test_the_values_reach_the_job():
    job = resources("--gpus", "2", "--cores", "6", "--memory", "32Gi")["Job"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == IMAGE and container["args"] == ["study"]
    assert container["resources"]["limits"] == {"cpu": "6", "memory": "32Gi", "nvidia.com/gpu": 2}


def test_the_pod_may_do_no_more_than_the_image_needs():
    pod = resources()["Job"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
    assert mounted["results"] == "/study/results"


def test_the_policy_and_the_job_name_the_same_pods():
    found = resources()
    labels = found["Job"]["spec"]["template"]["metadata"]["labels"]
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert not {"ingress", "egress"} & set(policy)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--image", "tilewright:latest"), "name it by digest"),
        (("--image", IMAGE, "--memory", "64Gi\n- x"), "--memory"),
        (("--image", IMAGE, "--storage", "much"), "--storage much"),
        (("--image", IMAGE, "--gpus", "-1"), "--gpus -1"),
    ],
)
def test_a_value_that_cannot_stand_there_is_named(words, named):
    done = rendered(*words)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("tilewright: ") and named in done.stderr


def test_every_value_of_the_template_is_an_option():
    render = runpy.run_path(str(RENDER))["render"]
    given = {"command": "study", "gpus": 1, "cores": 1, "memory": "1Gi", "storage": "1Gi"}
    assert "${" not in render(image=IMAGE, **given)
