"""Those fields of a JobSet (jobset.x-k8s.io/v1alpha2), a Job and a Pod that launch/ uses, by hand.

After the API references of JobSet and of Kubernetes. Whatever else a file has is refused: a field
with a spelling mistake, too. The cluster's own schema is larger, and decides: JobSet's file
config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml (at commit 08dfbdf its SHA-256 begins with
029f74bb), with which launch/jobset.yaml was validated by hand.
"""
TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}


def record(required=(), **fields):
    return {"type": "object", "properties": fields, "required": list(required),
            "additionalProperties": False}


def several(item):
    return {"type": "array", "items": item, "minItems": 1}


FIELD = record(["fieldRef"], fieldRef=record(["fieldPath"], fieldPath=TEXT))
VARIABLE = {"oneOf": [record(["name", "value"], name=TEXT, value=TEXT),
                      record(["name", "valueFrom"], name=TEXT, valueFrom=FIELD)]}
CONTAINER = record(
    ["name", "image"], name=TEXT, image=TEXT, workingDir=TEXT, command=several(TEXT),
    env=several(VARIABLE), resources=record(limits={"type": "object"}),
    volumeMounts=several(record(["name", "mountPath"], name=TEXT, mountPath=TEXT)))
VOLUME = record(["name"], name=TEXT, persistentVolumeClaim=record(["claimName"], claimName=TEXT))
POD = record(
    ["containers", "restartPolicy"], restartPolicy={"enum": ["Never", "OnFailure"]},
    terminationGracePeriodSeconds=COUNT, containers=several(CONTAINER), volumes=several(VOLUME))
JOB = record(
    ["template"], parallelism=COUNT, completions=COUNT, backoffLimit=COUNT,
    completionMode={"enum": ["Indexed", "NonIndexed"]}, template=record(["spec"], spec=POD))
JOBSET = record(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"}, kind={"const": "JobSet"},
    metadata=record(["name"], name=TEXT),
    spec=record(
        ["replicatedJobs"], failurePolicy=record(maxRestarts=COUNT),
        coordinator=record(["replicatedJob"], replicatedJob=TEXT, jobIndex=COUNT, podIndex=COUNT),
        network=record(enableDNSHostnames={"type": "boolean"}),
        replicatedJobs=several(record(
            ["name", "template"], name=TEXT, replicas=COUNT,
            template=record(["spec"], spec=JOB)))))
