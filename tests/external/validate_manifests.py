"""Checks the manifests of deploy/kubernetes: against the API's schemas, how they refer to one another, and the gateway's
configuration in them."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import kubernetes_validate
import yaml

BINARY, FOLDER = sys.argv[1], pathlib.Path(sys.argv[2])
# Kinds of the Prometheus operator and of kustomize, which the Kubernetes API does not have.
OTHER_KINDS = {"ServiceMonitor", "Kustomization"}
CONTROLLERS = {"Deployment"}


def documents(name):
    return [document for document in yaml.safe_load_all((FOLDER / name).read_text())]


def find(kind, name, group):
    (found,) = [each for each in group if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def seconds(text):
    return int(re.fullmatch(r"(\d+)s", text)[1])


def check_group(group):
    """Manifests that are applied together."""
    (workload,) = [each for each in group if each["kind"] in CONTROLLERS]
    template = workload["spec"]["template"]
    labels, pod = template["metadata"]["labels"], template["spec"]
    assert workload["spec"]["selector"]["matchLabels"] == labels
    containers = pod.get("initContainers", []) + pod["containers"]
    (gateway,) = [each for each in containers if each["name"] == "transom"]
    ports = {port["name"]: port["containerPort"] for port in gateway["ports"]}

    for each in group:
        spec = each.get("spec", {})
        match each["kind"]:
            case "Service":
                assert spec["selector"].items() <= labels.items(), each
                assert all(port["targetPort"] in ports for port in spec["ports"]), each
            case "PodDisruptionBudget":
                assert spec["selector"]["matchLabels"].items() <= labels.items(), each
            case "NetworkPolicy":
                assert spec["podSelector"]["matchLabels"].items() <= labels.items(), each
                assert all(port["port"] in ports for rule in spec["ingress"] for port in rule["ports"]), each
            case "ServiceMonitor":
                (service,) = [one for one in group if one["kind"] == "Service" and spec["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()]
                assert {end["port"] for end in spec["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}

    security = pod["securityContext"]
    assert security["runAsNonRoot"] and security["seccompProfile"]["type"] == "RuntimeDefault"
    confined = gateway["securityContext"]
    assert confined["readOnlyRootFilesystem"] and not confined["allowPrivilegeEscalation"]
    assert confined["capabilities"] == {"drop": ["ALL"]}
    for probe in ["startupProbe", "readinessProbe", "livenessProbe"]:
        assert gateway.get(probe, {}).get("httpGet", {"port": "http"})["port"] in ports, probe

    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in gateway["volumeMounts"]}
    assert set(volumes) >= {mount["name"] for mount in gateway["volumeMounts"]}
    config = find("ConfigMap", mounted["/etc/transom"]["configMap"]["name"], group)["data"]["gateway.toml"]
    check_config(config, gateway, mounted)
    delay, drain = (seconds(re.search(rf'^{name} = "(.*?)"', config, re.M)[1]) for name in ["delay", "drain"])
    assert delay + drain < pod["terminationGracePeriodSeconds"], (delay, drain)
    for name, port in ports.items():
        assert re.search(rf'^{name} *= "0\.0\.0\.0:{port}"', config, re.M), name


def check_config(config, gateway, mounted):
    """`transom check`, with the secrets that the pod would have."""
    with tempfile.TemporaryDirectory() as folder:
        for path, volume in mounted.items():
            for item in volume.get("secret", {}).get("items", []):
                secret = pathlib.Path(folder, item["path"])
                secret.write_text("a-secret\n")
                assert f"{path}/{item['path']}" in config
                config = config.replace(f"{path}/{item['path']}", str(secret))
        file = pathlib.Path(folder, "gateway.toml")
        file.write_text(config)
        variables = {variable["name"]: "a-secret" for variable in gateway.get("env", [])}
        checked = subprocess.run([BINARY, "check", "--config", file], env=os.environ | variables, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def main():
    kustomization = documents("kustomization.yaml")[0]
    alone = {"kustomization.yaml", "sidecar.yaml", "service-monitor.yaml"}
    assert set(kustomization["resources"]) == {path.name for path in FOLDER.glob("*.yaml")} - alone
    group = [document for name in kustomization["resources"] for document in documents(name)]
    sidecar, monitor = documents("sidecar.yaml"), documents("service-monitor.yaml")
    every = group + sidecar + monitor
    for document in every:
        if document["kind"] not in OTHER_KINDS:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    check_group(group + monitor)
    check_group(sidecar)
    print(f"{len(every)} manifests are valid for Kubernetes {kubernetes_validate.latest_version()}")


main()
