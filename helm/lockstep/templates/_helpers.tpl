{{/* Names, labels, and the common parts of all roles' pods. */}}

{{- define "lockstep.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Forty characters, so that `-coordinator` and a revision's hash still fit in a label. */}}
{{- define "lockstep.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.selector" -}}
app.kubernetes.io/name: {{ include "lockstep.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "lockstep.labels" -}}
{{ include "lockstep.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* metadata of an object: (dict "root" $ "name" "router" "component" "router") */}}
{{- define "lockstep.metadata" -}}
name: {{ include "lockstep.fullname" .root }}{{ with .name }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "lockstep.labels" .root | nindent 2 }}
  {{- with .component }}
  app.kubernetes.io/component: {{ . }}
  {{- end }}
{{- end -}}

{{- define "lockstep.image" -}}
{{- $tag := .Values.image.tag | default (printf "%s%s" .Chart.AppVersion (ternary "-cuda" "" (eq .Values.device "cuda"))) -}}
{{- if .Values.image.digest -}}
{{ printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else -}}
{{ printf "%s:%s" .Values.image.repository $tag }}
{{- end -}}
{{- end -}}

{{- define "lockstep.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "lockstep.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{- define "lockstep.joinSecret" -}}
{{ .Values.join.existingSecret | default (printf "%s-join" (include "lockstep.fullname" .)) }}
{{- end -}}

{{/* -- the grid */}}

{{- define "lockstep.ranks" -}}
{{ mul .Values.topology.tp .Values.topology.pp }}
{{- end -}}

{{- define "lockstep.ranksPerPod" -}}
{{ .Values.topology.ranksPerPod | int | default (include "lockstep.ranks" . | int) }}
{{- end -}}

{{- define "lockstep.podsPerGroup" -}}
{{ div (include "lockstep.ranks" . | int) (include "lockstep.ranksPerPod" . | int) }}
{{- end -}}

{{/* serve, pod, lws or statefulset */}}
{{- define "lockstep.layout" -}}
{{- $groups := .Values.topology.groups -}}
{{- if eq .Values.mode "serve" -}}serve
{{- else if eq (include "lockstep.podsPerGroup" . | int) 1 -}}pod
{{- else if eq $groups "StatefulSet" -}}statefulset
{{- else if or (eq $groups "LeaderWorkerSet") (.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1") -}}lws
{{- else -}}statefulset
{{- end -}}
{{- end -}}

{{/* The number of groups whose addresses the router gets: the maximum. */}}
{{- define "lockstep.groupsMax" -}}
{{ ternary .Values.autoscaling.maxReplicas .Values.replicas .Values.autoscaling.enabled }}
{{- end -}}

{{/* The workload with the coordinators; its headless Service names their pods. */}}
{{- define "lockstep.coordinatorHolder" -}}
{{ include "lockstep.fullname" . }}-{{ ternary "coordinator" "replica" (eq (include "lockstep.layout" .) "statefulset") }}
{{- end -}}

{{/* The address of a group's coordinator: (dict "root" $ "group" 0) */}}
{{- define "lockstep.coordinatorAddress" -}}
{{- $holder := include "lockstep.coordinatorHolder" .root -}}
{{ printf "%s-%v.%s.%s.svc:%v" $holder .group $holder .root.Release.Namespace .root.Values.network.coordinatorPort }}
{{- end -}}

{{/* -- the store in which coordinators register, and routers find them */}}

{{- define "lockstep.hasEtcd" -}}
{{- if and (eq .Values.mode "roles") (ne .Values.etcd.mode "none") -}}yes{{- end -}}
{{- end -}}

{{- define "lockstep.etcdEndpoints" -}}
{{- if eq .Values.etcd.mode "external" -}}
{{ join "," .Values.etcd.external.endpoints }}
{{- else -}}
{{- $name := printf "%s-etcd" (include "lockstep.fullname" .) -}}
{{- $members := list -}}
{{- range $n := until (int .Values.etcd.own.members) -}}
{{- $scheme := ternary "https://" "" $.Values.etcd.own.tls.enabled -}}
{{- $members = append $members (printf "%s%s-%d.%s.%s.svc:2379" $scheme $name $n $name $.Release.Namespace) -}}
{{- end -}}
{{ join "," $members }}
{{- end -}}
{{- end -}}

{{- define "lockstep.etcdArgs" -}}
- --etcd-endpoints={{ include "lockstep.etcdEndpoints" . }}
- --etcd-prefix={{ .Values.etcd.prefix | default (printf "/lockstep/%s/%s" .Release.Namespace (include "lockstep.fullname" .)) }}
{{- if eq .Values.etcd.mode "external" }}
{{- with .Values.etcd.external }}
{{- if .tls.caSecret.name }}
- --etcd-ca=/etc/lockstep/etcd-ca/ca
{{- end }}
{{- if .tls.clientSecret }}
- --etcd-cert=/etc/lockstep/etcd-client/tls.crt
- --etcd-key=/etc/lockstep/etcd-client/tls.key
{{- end }}
{{- if .user }}
- --etcd-user={{ .user }}
- --etcd-password-file=/etc/lockstep/etcd-password/password
{{- end }}
{{- end }}
{{- else if .Values.etcd.own.tls.enabled }}
- --etcd-ca=/etc/lockstep/etcd-client/ca.crt
- --etcd-cert=/etc/lockstep/etcd-client/tls.crt
- --etcd-key=/etc/lockstep/etcd-client/tls.key
{{- end }}
{{- end -}}

{{- define "lockstep.etcdTlsSecret" -}}
{{ .Values.etcd.own.tls.existingSecret | default (printf "%s-etcd-tls" (include "lockstep.fullname" .)) }}
{{- end -}}

{{- define "lockstep.hasOwnEtcdTls" -}}
{{- if and (include "lockstep.hasEtcd" .) (eq .Values.etcd.mode "own") .Values.etcd.own.tls.enabled -}}yes{{- end -}}
{{- end -}}

{{- define "lockstep.etcdMounts" -}}
{{- if and (include "lockstep.hasEtcd" .) (eq .Values.etcd.mode "external") }}
{{- with .Values.etcd.external }}
{{- if .tls.caSecret.name }}
- {name: etcd-ca, mountPath: /etc/lockstep/etcd-ca, readOnly: true}
{{- end }}
{{- if .tls.clientSecret }}
- {name: etcd-client, mountPath: /etc/lockstep/etcd-client, readOnly: true}
{{- end }}
{{- if .user }}
- {name: etcd-password, mountPath: /etc/lockstep/etcd-password, readOnly: true}
{{- end }}
{{- end }}
{{- else if include "lockstep.hasOwnEtcdTls" . }}
- {name: etcd-client, mountPath: /etc/lockstep/etcd-client, readOnly: true}
{{- end }}
{{- end -}}

{{- define "lockstep.etcdVolumes" -}}
{{- if and (include "lockstep.hasEtcd" .) (eq .Values.etcd.mode "external") }}
{{- with .Values.etcd.external }}
{{- if .tls.caSecret.name }}
- name: etcd-ca
  secret:
    secretName: {{ .tls.caSecret.name }}
    items: [{key: {{ .tls.caSecret.key }}, path: ca}]
    defaultMode: 0440
{{- end }}
{{- if .tls.clientSecret }}
- name: etcd-client
  secret: {secretName: {{ .tls.clientSecret }}, defaultMode: 0440}
{{- end }}
{{- if .user }}
- name: etcd-password
  secret:
    secretName: {{ .passwordSecret.name }}
    items: [{key: {{ .passwordSecret.key }}, path: password}]
    defaultMode: 0440
{{- end }}
{{- end }}
{{- else if include "lockstep.hasOwnEtcdTls" . }}
- name: etcd-client
  secret:
    secretName: {{ include "lockstep.etcdTlsSecret" . }}
    # Roles do not get the members' key.
    items: [{key: ca.crt, path: ca.crt}, {key: client.crt, path: tls.crt}, {key: client.key, path: tls.key}]
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "lockstep.any" -}}
{{ ternary "[::]" "0.0.0.0" (eq .Values.network.ipFamily "IPv6") }}
{{- end -}}

{{- define "lockstep.podIp" -}}
{{ ternary "[$(POD_IP)]" "$(POD_IP)" (eq .Values.network.ipFamily "IPv6") }}
{{- end -}}

{{/* -- how long a termination may take */}}

{{- define "lockstep.graceNeeded" -}}
{{ add .Values.drain.preStopSeconds .Values.drain.drainSeconds .Values.drain.marginSeconds }}
{{- end -}}

{{- define "lockstep.grace" -}}
{{- if kindIs "invalid" .Values.drain.terminationGracePeriodSeconds -}}
{{ include "lockstep.graceNeeded" . }}
{{- else -}}
{{ .Values.drain.terminationGracePeriodSeconds | int }}
{{- end -}}
{{- end -}}

{{/* A rank in its own pod outlives its coordinator's drain, so its SIGTERM is delayed. */}}
{{- define "lockstep.workerPreStop" -}}
{{ add .Values.drain.drainSeconds 2 }}
{{- end -}}

{{- define "lockstep.workerGrace" -}}
{{ max (add (include "lockstep.workerPreStop" . | int) .Values.drain.marginSeconds) (include "lockstep.grace" . | int) }}
{{- end -}}

{{/* -- pods */}}

{{- define "lockstep.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser }}
runAsGroup: {{ .Values.podSecurity.runAsGroup }}
fsGroup: {{ .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "lockstep.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* A rank's security context: with RDMA it may pin memory. */}}
{{- define "lockstep.rankSecurityContext" -}}
{{ include "lockstep.securityContext" . }}
{{- if .Values.rdma.enabled }}
  add: [IPC_LOCK]
{{- end }}
{{- end -}}

{{/*
Contains no version, so that pods that hold GPUs are replaced only if their spec changes. (dict "root" $ "component"
"router" "of" .Values.router)
*/}}
{{- define "lockstep.podMetadata" -}}
labels:
  {{- include "lockstep.selector" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- with .of.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .of.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The pods of some roles of this release, as a label selector: (dict "root" $ "components" (list "router")) */}}
{{- define "lockstep.podsOf" -}}
matchLabels:
  {{- include "lockstep.selector" .root | nindent 2 }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [{{ join ", " .components }}]}
{{- end -}}

{{/* The scheduling of pods: (dict "root" $ "of" .Values.router "components" (list "router")) */}}
{{- define "lockstep.placement" -}}
{{- $pods := include "lockstep.podsOf" . | fromYaml -}}
{{- $byNode := dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway" -}}
{{- $affinity := deepCopy (default (dict) .of.affinity) -}}
{{- $apart := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" $pods -}}
{{- if eq (default "none" .of.antiAffinity) "hard" -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $apart)) -}}
{{- else if eq (default "none" .of.antiAffinity) "soft" -}}
{{- $preferred := dict "weight" 100 "podAffinityTerm" $apart -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list $preferred)) -}}
{{- end -}}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  {{- range default (list $byNode) .of.topologySpreadConstraints }}
  - {{- merge (dict) . (dict "labelSelector" $pods) | toYaml | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* The beginning of every pod's spec: (dict "root" $ "of" .Values.router "components" (list "router") "grace" 45) */}}
{{- define "lockstep.podSpec" -}}
serviceAccountName: {{ include "lockstep.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .grace }}
securityContext:
  {{- include "lockstep.podSecurityContext" .root | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- include "lockstep.placement" . }}
{{- end -}}

{{- define "lockstep.container" -}}
image: {{ include "lockstep.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}

{{/*
Probes by gRPC's own health service: the service without a name reports readiness, `live` only that the process runs.
(dict "root" $ "port" 9100), the port's number
*/}}
{{- define "lockstep.probes" -}}
startupProbe:
  grpc: {port: {{ .port }}, service: live}
  timeoutSeconds: 3
  {{- toYaml .root.Values.probes.startup | nindent 2 }}
readinessProbe:
  grpc: {port: {{ .port }}}
  timeoutSeconds: 3
  {{- toYaml .root.Values.probes.readiness | nindent 2 }}
livenessProbe:
  grpc: {port: {{ .port }}, service: live}
  timeoutSeconds: 5
  {{- toYaml .root.Values.probes.liveness | nindent 2 }}
{{- end -}}

{{/* -- the model */}}

{{/* The model argument of the program. */}}
{{- define "lockstep.model" -}}
{{- if eq .Values.model.source "hub" -}}
{{ .Values.model.name }}
{{- else -}}
/model/{{ .Values.model.path }}
{{- end -}}
{{- end -}}

{{- define "lockstep.modelEnv" -}}
- name: LOCKSTEP_CACHE
  value: /cache
{{- /* The volume has room for the model, and not for its packed weights. */}}
- name: LOCKSTEP_PACKED_CACHE
  value: "off"
{{- if eq .Values.model.source "hub" }}
{{- with .Values.model.hub.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Fetches missing files and verifies their checksums. It uses the same image, so that both resolve a name alike. */}}
{{- define "lockstep.modelInit" -}}
{{- $isHub := eq .Values.model.source "hub" }}
{{- if or $isHub .Values.model.sha256 }}
- name: model
  {{- include "lockstep.container" . | nindent 2 }}
  args:
    - pull
    - {{ include "lockstep.model" . | quote }}
    {{- with .Values.model.sha256 }}
    - --sha256={{ . }}
    {{- end }}
  env:
    {{- include "lockstep.modelEnv" . | trim | nindent 4 }}
    {{- with .Values.model.hub.tokenSecret }}
    {{- if and $isHub .name }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
    {{- end }}
    {{- end }}
  resources:
    requests: {cpu: 500m, memory: 256Mi}
    limits: {memory: 1Gi}
  securityContext:
    {{- include "lockstep.securityContext" . | nindent 4 }}
  volumeMounts:
    {{- include "lockstep.modelMounts" . | trim | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "lockstep.modelMounts" -}}
- {name: cache, mountPath: /cache}
{{- if eq .Values.model.source "pvc" }}
- name: model
  mountPath: /model
  readOnly: true
  {{- with .Values.model.pvc.subPath }}
  subPath: {{ . }}
  {{- end }}
{{- else if eq .Values.model.source "image" }}
- {name: model, mountPath: /model, readOnly: true}
{{- end }}
{{- end -}}

{{/* The claim with pulled models, if there is one. */}}
{{- define "lockstep.cacheClaim" -}}
{{- with .Values.model.hub.cache -}}
{{- if .create.enabled -}}
{{ include "lockstep.fullname" $ }}-models
{{- else -}}
{{ .claim }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.modelVolumes" -}}
- name: cache
  {{- $claim := include "lockstep.cacheClaim" . }}
  {{- if and (eq .Values.model.source "hub") $claim }}
  persistentVolumeClaim: {claimName: {{ $claim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.model.hub.cache.sizeLimit }}}
  {{- end }}
{{- if eq .Values.model.source "pvc" }}
- name: model
  persistentVolumeClaim: {claimName: {{ .Values.model.pvc.claim }}, readOnly: true}
{{- else if eq .Values.model.source "image" }}
- name: model
  image: {reference: {{ .Values.model.image.reference | quote }}, pullPolicy: {{ .Values.model.image.pullPolicy }}}
{{- end }}
{{- end -}}

{{/* -- volumes and flags from values, beside the chart's own */}}

{{/*
The extra volumes of one role, or of two with containers in one pod, each once: (list .Values.coordinator
.Values.workers)
*/}}
{{- define "lockstep.extraVolumes" -}}
{{- $all := list -}}
{{- range . -}}{{- $all = concat $all .extraVolumes -}}{{- end -}}
{{- with uniq $all -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{/* Rejects flags that the program would get twice: (dict "given" "- --a=1" "of" .Values.router "role" "router") */}}
{{- define "lockstep.extraArgs" -}}
{{- $seen := list -}}
{{- range regexFindAll "(?m)^- --[a-z0-9-]+" .given -1 -}}
{{- $seen = append $seen (trimPrefix "- " .) -}}
{{- end -}}
{{- $role := .role -}}
{{- range .of.extraArgs -}}
{{- $flag := regexFind "^--[a-z0-9-]+" . -}}
{{- if and (has $flag $seen) (not (has $flag (list "--coordinator" "--text"))) -}}
{{- fail (printf "%s.extraArgs repeats %s: set the chart's value for this flag instead" $role $flag) -}}
{{- end -}}
{{- $seen = append $seen $flag -}}
{{- end -}}
{{- with .of.extraArgs -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{/* -- arguments */}}

{{- define "lockstep.logArgs" -}}
- --log-format={{ .Values.log.format }}
{{- with .Values.log.filter }}
- --log={{ . }}
{{- end }}
{{- with .Values.telemetry }}
{{- if .otlpEndpoint }}
- --otlp-endpoint={{ .otlpEndpoint }}
- --otlp-protocol={{ .otlpProtocol }}
- --otlp-sample={{ .sample }}
- --otlp-metrics-seconds={{ .metricsSeconds | int64 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Arguments that must be the same for router and coordinator. */}}
{{- define "lockstep.limitArgs" -}}
{{- with .Values.model.servedName }}
- --served-model-name={{ . }}
{{- end }}
{{- with .Values.engine.maxBatchTokens }}
- --max-batch-tokens={{ . | int64 }}
{{- end }}
{{- with .Values.engine.maxRunning }}
- --max-running={{ . | int64 }}
{{- end }}
{{- with .Values.engine.maxWaiting }}
- --max-waiting={{ . | int64 }}
{{- end }}
- --drain-seconds={{ .Values.drain.drainSeconds }}
{{- end -}}

{{/* Arguments of the role that plans steps: the coordinator, or `serve`. */}}
{{- define "lockstep.engineArgs" -}}
- --tp={{ .Values.topology.tp }}
- --pp={{ .Values.topology.pp }}
- --device={{ .Values.device }}
{{- with .Values.engine.numerics }}
- --numerics={{ . }}
{{- end }}
{{- with .Values.engine.activations }}
- --activations={{ . }}
{{- end }}
{{- with .Values.engine.kvDtype }}
- --kv-dtype={{ . }}
{{- end }}
{{- with .Values.engine.kvMemory }}
- --kv-memory={{ . }}
{{- end }}
{{- with .Values.engine.context }}
- --context={{ . | int64 }}
{{- end }}
{{- with .Values.engine.maxChunkTokens }}
- --max-chunk-tokens={{ . | int64 }}
{{- end }}
{{- if not (kindIs "invalid" .Values.engine.prefixCache) }}
- --prefix-cache={{ .Values.engine.prefixCache }}
{{- end }}
{{- if .Values.engine.zeroKv }}
- --zero-kv
{{- end }}
{{- if not (kindIs "invalid" .Values.engine.speculation) }}
- --speculation={{ .Values.engine.speculation }}
{{- end }}
{{- if .Values.telemetry.steps }}
- --otlp-steps
{{- end }}
{{- end -}}

{{/* Arguments of the role that serves clients: the router, or `serve`. */}}
{{- define "lockstep.doorArgs" -}}
- --http={{ include "lockstep.any" . }}:{{ .Values.network.httpPort }}
- --grpc={{ include "lockstep.any" . }}:{{ .Values.network.grpcPort }}
{{- if .Values.apiKeys.existingSecret }}
- --api-keys=/etc/lockstep/keys/keys
{{- end }}
{{- if .Values.admin.enabled }}
- --admin={{ include "lockstep.any" . }}:{{ .Values.admin.port }}
{{- if .Values.admin.keySecret.name }}
- --admin-keys=/etc/lockstep/admin/key
{{- end }}
{{- end }}
{{- if .Values.tls.secret }}
- --api-tls-cert=/etc/lockstep/tls/tls.crt
- --api-tls-key=/etc/lockstep/tls/tls.key
{{- if .Values.tls.clientCaSecret.name }}
- --api-client-ca=/etc/lockstep/client-ca/ca
{{- end }}
{{- end }}
{{- if .Values.telemetry.content }}
- --otlp-content
{{- end }}
{{- with .Values.answers }}
{{- if not (kindIs "invalid" .audit) }}
- --audit={{ .audit }}
{{- end }}
{{- if .record.enabled }}
- --record=/var/lib/lockstep/record/answers
- --record-bytes={{ .record.bytes }}
{{- if .record.prompts }}
- --record-prompts
{{- end }}
{{- end }}
{{- if not (kindIs "invalid" .stored.responses) }}
- --stored-responses={{ .stored.responses | int64 }}
{{- end }}
{{- with .stored.bytes }}
- --stored-bytes={{ . }}
{{- end }}
{{- with .stored.seconds }}
- --stored-seconds={{ . | int64 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "lockstep.doorPorts" -}}
- {name: http, containerPort: {{ .Values.network.httpPort }}}
- {name: grpc, containerPort: {{ .Values.network.grpcPort }}}
{{- if .Values.admin.enabled }}
- {name: admin, containerPort: {{ .Values.admin.port }}}
{{- end }}
{{- end -}}

{{/*
Probes of the role that serves clients: at the operators' port if there is one, because clients' ports may require TLS.
*/}}
{{- define "lockstep.doorProbes" -}}
{{- if .Values.admin.enabled -}}
startupProbe:
  httpGet: {path: /livez, port: admin}
  timeoutSeconds: 3
  {{- toYaml .Values.probes.startup | nindent 2 }}
readinessProbe:
  httpGet: {path: /ready, port: admin}
  timeoutSeconds: 3
  {{- toYaml .Values.probes.readiness | nindent 2 }}
livenessProbe:
  httpGet: {path: /livez, port: admin}
  timeoutSeconds: 5
  {{- toYaml .Values.probes.liveness | nindent 2 }}
{{- else -}}
{{- include "lockstep.probes" (dict "root" . "port" .Values.network.grpcPort) -}}
{{- end -}}
{{- end -}}

{{/* The maximum size of a record's files and an eighth more, as a Kubernetes quantity. */}}
{{- define "lockstep.recordSize" -}}
{{- $kib := dict "KiB" 1 "MiB" 1024 "GiB" 1048576 "TiB" 1073741824 -}}
{{- $unit := regexFind "[A-Z].*$" .bytes -}}
{{- $n := trimSuffix $unit .bytes | int64 -}}
{{- printf "%dKi" (div (mul $n (get $kib $unit) 9) 8) -}}
{{- end -}}

{{- define "lockstep.keyMounts" -}}
{{- if .Values.answers.record.enabled }}
- {name: record, mountPath: /var/lib/lockstep/record}
{{- end }}
{{- if .Values.apiKeys.existingSecret }}
- {name: keys, mountPath: /etc/lockstep/keys, readOnly: true}
{{- end }}
{{- if and .Values.admin.enabled .Values.admin.keySecret.name }}
- {name: admin-key, mountPath: /etc/lockstep/admin, readOnly: true}
{{- end }}
{{- if .Values.tls.secret }}
- {name: tls, mountPath: /etc/lockstep/tls, readOnly: true}
{{- if .Values.tls.clientCaSecret.name }}
- {name: client-ca, mountPath: /etc/lockstep/client-ca, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{- define "lockstep.keyVolumes" -}}
{{- with .Values.answers.record }}
{{- if .enabled }}
- name: record
  {{- if .claim }}
  persistentVolumeClaim: {claimName: {{ .claim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ include "lockstep.recordSize" . }}}
  {{- end }}
{{- end }}
{{- end }}
{{- if .Values.apiKeys.existingSecret }}
- name: keys
  secret:
    secretName: {{ .Values.apiKeys.existingSecret }}
    items: [{key: {{ .Values.apiKeys.key }}, path: keys}]
    defaultMode: 0440
{{- end }}
{{- with .Values.admin }}
{{- if and .enabled .keySecret.name }}
- name: admin-key
  secret:
    secretName: {{ .keySecret.name }}
    items: [{key: {{ .keySecret.key }}, path: key}]
    defaultMode: 0440
{{- end }}
{{- end }}
{{- with .Values.tls }}
{{- if .secret }}
- name: tls
  secret: {secretName: {{ .secret }}, defaultMode: 0440}
{{- if .clientCaSecret.name }}
- name: client-ca
  secret:
    secretName: {{ .clientCaSecret.name }}
    items: [{key: {{ .clientCaSecret.key }}, path: ca}]
    defaultMode: 0440
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "lockstep.tokenMount" -}}
- {name: join, mountPath: /etc/lockstep/join, readOnly: true}
{{- end -}}

{{- define "lockstep.tokenVolume" -}}
- name: join
  secret:
    secretName: {{ include "lockstep.joinSecret" . }}
    items: [{key: {{ .Values.join.key }}, path: token}]
    defaultMode: 0440
{{- end -}}

{{- define "lockstep.podEnv" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{/* Resource attributes for spans, logs and metrics; must follow POD_NAME. */}}
{{- define "lockstep.telemetryEnv" -}}
{{- if .Values.telemetry.otlpEndpoint }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name={{ .Release.Namespace }},k8s.pod.name=$(POD_NAME)
{{- end }}
{{- end -}}

{{/* Whether KEDA scales the groups, rather than a HorizontalPodAutoscaler alone. */}}
{{- define "lockstep.scalesByKeda" -}}
{{- $kind := .Values.autoscaling.kind -}}
{{- if or (eq $kind "keda") (and (eq $kind "auto") (.Capabilities.APIVersions.Has "keda.sh/v1alpha1")) -}}yes{{- end -}}
{{- end -}}

{{/*
Whether to render an object that requires an API: (list $ "auto" "monitoring.coreos.com/v1"); true always renders it.
*/}}
{{- define "lockstep.isRendered" -}}
{{- $root := index . 0 }}{{- $value := index . 1 | toString }}{{- $api := index . 2 -}}
{{- if or (eq $value "true") (and (eq $value "auto") ($root.Capabilities.APIVersions.Has $api)) -}}yes{{- end -}}
{{- end -}}

{{/* Whether such an object is rendered in a cluster that has the API. */}}
{{- define "lockstep.mayRender" -}}
{{- if ne (. | toString) "false" -}}yes{{- end -}}
{{- end -}}
