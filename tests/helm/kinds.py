"""Closed schemas of the kinds that are not Kubernetes's own, as far as the chart uses them: a field that is not here is
a mistake, or one more line here. Below a pod's template Kubernetes's own schema holds."""

STRING, COUNT, BOOL = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
STRINGS = {"type": "object", "additionalProperties": STRING}


def closed(required, optional=None):
    properties = {**required, **(optional or {})}
    return {"type": "object", "additionalProperties": False, "required": sorted(required), "properties": properties}


def listed(of, least=0):
    return {"type": "array", "items": of, "minItems": least}


SELECTOR = closed({}, {"matchLabels": STRINGS, "matchExpressions": listed(
    closed({"key": STRING, "operator": {"const": "In"}, "values": listed(STRING, 1)}))})
POD_TEMPLATE = closed({"metadata": closed({"labels": STRINGS}, {"annotations": STRINGS}), "spec": {"type": "object"}})
SCRAPED = listed(closed(
    {"port": STRING, "path": STRING, "interval": STRING},
    {"authorization": closed({"credentials": closed({"name": STRING, "key": STRING})})}), 1)
SCALE_TARGET = closed({"apiVersion": STRING, "kind": STRING, "name": STRING})


def whole(api_version, kind, spec):
    metadata = closed({"name": STRING, "namespace": STRING, "labels": STRINGS}, {"annotations": STRINGS})
    return closed({"apiVersion": {"const": api_version}, "kind": {"const": kind}, "metadata": metadata, "spec": spec})


RULE = {"oneOf": [
    closed({"record": STRING, "expr": STRING}),
    closed({"alert": STRING, "expr": STRING, "labels": STRINGS, "annotations": STRINGS}, {"for": STRING}),
]}

KINDS = {
    "LeaderWorkerSet": whole("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", closed({
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "rolloutStrategy": closed({"type": {"const": "RollingUpdate"}, "rollingUpdateConfiguration": closed(
            {"maxUnavailable": COUNT, "maxSurge": COUNT})}),
        "networkConfig": closed({"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}}),
        "leaderWorkerTemplate": closed({
            "size": {"type": "integer", "minimum": 2},
            "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "None"]},
            "leaderTemplate": POD_TEMPLATE, "workerTemplate": POD_TEMPLATE}),
    }, {"replicas": COUNT})),
    "PodMonitor": whole("monitoring.coreos.com/v1", "PodMonitor", closed({
        "selector": SELECTOR, "podTargetLabels": listed(STRING), "podMetricsEndpoints": SCRAPED})),
    "ServiceMonitor": whole("monitoring.coreos.com/v1", "ServiceMonitor", closed({
        "selector": SELECTOR, "podTargetLabels": listed(STRING), "endpoints": SCRAPED})),
    "PrometheusRule": whole("monitoring.coreos.com/v1", "PrometheusRule", closed({
        "groups": listed(closed({"name": STRING, "rules": listed(RULE, 1)}, {"interval": STRING}), 1)})),
    "ScaledObject": whole("keda.sh/v1alpha1", "ScaledObject", closed({
        "scaleTargetRef": SCALE_TARGET, "minReplicaCount": COUNT, "maxReplicaCount": COUNT,
        "advanced": closed({"horizontalPodAutoscalerConfig": closed({"behavior": closed({"scaleDown": closed({
            # As a HorizontalPodAutoscaler's own schema has it.
            "stabilizationWindowSeconds": {"type": "integer", "minimum": 0, "maximum": 3600}})})})}),
        "triggers": listed(closed({
            "type": {"const": "prometheus"}, "metricType": {"enum": ["AverageValue", "Value"]},
            "metadata": closed({"serverAddress": STRING, "threshold": STRING, "query": STRING})}), 1)})),
    "HTTPRoute": whole("gateway.networking.k8s.io/v1", "HTTPRoute", closed({
        "parentRefs": listed(closed({"name": STRING}, {"namespace": STRING, "sectionName": STRING, "port": COUNT}), 1),
        "rules": listed(closed({
            "matches": listed(closed({"path": closed({"type": {"const": "PathPrefix"}, "value": STRING})}), 1),
            "backendRefs": listed(closed({"name": STRING}, {"group": STRING, "kind": STRING, "port": COUNT}), 1),
            "timeouts": closed({"request": STRING})}), 1),
    }, {"hostnames": listed(STRING, 1)})),
    "InferencePool": whole("inference.networking.k8s.io/v1", "InferencePool", closed({
        "selector": closed({"matchLabels": STRINGS}),
        "targetPorts": listed(closed({"number": COUNT}), 1),
        "endpointPickerRef": closed({
            "name": STRING, "port": closed({"number": COUNT}), "failureMode": {"enum": ["FailOpen", "FailClose"]}})},
        {"appProtocol": {"enum": ["http", "kubernetes.io/h2c"]}})),
}
