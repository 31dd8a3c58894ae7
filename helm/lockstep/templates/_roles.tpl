{{/* The containers of a group: its coordinator, and its ranks. */}}

{{- define "lockstep.coordinatorContainer" -}}
- name: coordinator
  {{- include "lockstep.container" . | nindent 2 }}
  args:
    {{- $args := include "lockstep.coordinatorArgs" . }}
    {{- $args | nindent 4 }}
    {{- with include "lockstep.extraArgs" (dict "given" $args "of" .Values.coordinator "role" "coordinator") }}
    {{- . | nindent 4 }}
    {{- end }}
  env:
    {{- include "lockstep.podEnv" . | nindent 4 }}
    {{- with include "lockstep.telemetryEnv" . }}
    {{- . | trim | nindent 4 }}
    {{- end }}
    {{- include "lockstep.modelEnv" . | trim | nindent 4 }}
    {{- with .Values.coordinator.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - {name: coordinator, containerPort: {{ .Values.network.coordinatorPort }}}
    - {name: health, containerPort: {{ .Values.network.healthPort }}}
  {{- include "lockstep.probes" (dict "root" . "port" .Values.network.healthPort) | nindent 2 }}
  resources:
    {{- toYaml .Values.coordinator.resources | nindent 4 }}
  securityContext:
    {{- include "lockstep.securityContext" . | nindent 4 }}
  volumeMounts:
    {{- include "lockstep.tokenMount" . | nindent 4 }}
    {{- with include "lockstep.etcdMounts" . }}
    {{- . | trim | nindent 4 }}
    {{- end }}
    {{- include "lockstep.modelMounts" . | trim | nindent 4 }}
    {{- with .Values.coordinator.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/*
The resources of a rank's container: (dict "root" $ "ranks" 1), where `ranks` is the number of ranks that share it.
*/}}
{{- define "lockstep.rankResources" -}}
{{- $values := .root.Values -}}
{{- $resources := deepCopy $values.workers.resources -}}
{{- $extended := dict -}}
{{- if and (eq $values.device "cuda") $values.gpu.dra.enabled -}}
{{- $_ := set $resources "claims" (list (dict "name" "gpus")) -}}
{{- else if eq $values.device "cuda" -}}
{{- $_ := set $extended $values.gpu.resource (.ranks | toString) -}}
{{- end -}}
{{- if $values.rdma.enabled -}}
{{- $_ := set $extended $values.rdma.resource ($values.rdma.count | int | toString) -}}
{{- end -}}
{{- $_ := set $resources "limits" (merge (dict) $extended (default (dict) $resources.limits)) -}}
{{- $_ := set $resources "requests" (merge (dict) $extended (default (dict) $resources.requests)) -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "lockstep.rankEnv" -}}
{{- $shares := and (eq .Values.mode "roles") (gt (include "lockstep.ranksPerPod" . | int) 1) }}
{{- if and (eq .Values.device "cuda") (not .Values.gpu.dra.enabled) $shares }}
# With the device plugin each container sees only its own GPU and cannot open another's memory, so NCCL uses shared
# memory.
- {name: NCCL_P2P_DISABLE, value: "1"}
{{- end }}
{{- if .Values.rdma.enabled }}
- {name: NCCL_IB_DISABLE, value: "0"}
{{- range $name, $value := .Values.rdma.env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- with .Values.kvDisk.size }}
- {name: LOCKSTEP_KV_DISK, value: "/kv-disk:{{ . }}B"}
{{- end }}
{{- with .Values.kvHost.size }}
- {name: LOCKSTEP_KV_HOST, value: "{{ . }}B"}
{{- end }}
{{- with .Values.workers.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Where ranks keep pages of the KV cache. */}}
{{- define "lockstep.kvDiskMounts" -}}
{{- if .Values.kvDisk.size }}
- {name: kv-disk, mountPath: /kv-disk}
{{- end }}
{{- end -}}

{{- define "lockstep.kvDiskVolumes" -}}
{{- if .Values.kvDisk.size }}
- name: kv-disk
  {{- if .Values.kvDisk.claim }}
  persistentVolumeClaim: {claimName: {{ .Values.kvDisk.claim }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
{{- end -}}

{{/*
One rank: (dict "root" $ "n" 0 "join" "HOST:PORT" "isSidecar" true "fetches" false). A sidecar starts before its pod's
coordinator and ends after it, so a coordinator that drains still has its ranks. Only other ranks may connect to a mesh
port, so it has no probe: between epochs a rank does not answer there.
*/}}
{{- define "lockstep.rankContainer" -}}
{{- $values := .root.Values -}}
- name: rank-{{ .n }}
  {{- include "lockstep.container" .root | nindent 2 }}
  {{- if .isSidecar }}
  restartPolicy: Always
  {{- end }}
  args:
    {{- $args := include "lockstep.rankArgs" . }}
    {{- $args | nindent 4 }}
    {{- with include "lockstep.extraArgs" (dict "given" $args "of" $values.workers "role" "workers") }}
    {{- . | nindent 4 }}
    {{- end }}
  env:
    {{- include "lockstep.podEnv" .root | nindent 4 }}
    {{- with include "lockstep.telemetryEnv" .root }}
    {{- . | trim | nindent 4 }}
    {{- end }}
    {{- if eq (include "lockstep.layout" .root) "statefulset" }}
    - name: GROUP
      valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
    {{- end }}
    {{- include "lockstep.modelEnv" .root | trim | nindent 4 }}
    {{- with include "lockstep.rankEnv" .root }}
    {{- . | trim | nindent 4 }}
    {{- end }}
  ports:
    - {name: mesh-{{ .n }}, containerPort: {{ add $values.network.meshPort .n }}}
    - {name: health-{{ .n }}, containerPort: {{ add $values.network.healthPort 1 .n }}}
  {{- include "lockstep.probes" (dict "root" .root "port" (add $values.network.healthPort 1 .n)) | nindent 2 }}
  {{- if not .isSidecar }}
  lifecycle:
    preStop:
      sleep: {seconds: {{ include "lockstep.workerPreStop" .root }}}
  {{- end }}
  resources:
    {{- include "lockstep.rankResources" (dict "root" .root "ranks" 1) | nindent 4 }}
  securityContext:
    {{- include "lockstep.rankSecurityContext" .root | nindent 4 }}
  volumeMounts:
    - {name: shm, mountPath: /dev/shm}
    {{- include "lockstep.tokenMount" .root | nindent 4 }}
    {{- include "lockstep.modelMounts" .root | trim | nindent 4 }}
    {{- with include "lockstep.kvDiskMounts" .root }}
    {{- . | trim | nindent 4 }}
    {{- end }}
    {{- with $values.workers.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The volumes of a pod with ranks. Ranks of a pod share memory that they find through /proc. */}}
{{- define "lockstep.rankPod" -}}
{{- if gt (include "lockstep.ranksPerPod" . | int) 1 }}
shareProcessNamespace: true
{{- end }}
{{- include "lockstep.gpuPod" . }}
{{- end -}}

{{/* Fields of a pod with GPUs. */}}
{{- define "lockstep.gpuPod" -}}
{{- if eq .Values.device "cuda" }}
{{- with .Values.gpu.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- if .Values.gpu.dra.enabled }}
resourceClaims:
  - {name: gpus, resourceClaimTemplateName: {{ include "lockstep.fullname" . }}-gpus}
{{- end }}
{{- end }}
{{- end -}}

{{- define "lockstep.rankVolumes" -}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.shm.sizeLimit }}}
{{ include "lockstep.tokenVolume" . }}
{{ include "lockstep.modelVolumes" . | trim }}
{{- with include "lockstep.kvDiskVolumes" . }}
{{ . | trim }}
{{- end }}
{{- end -}}

{{/* The spec of a pod with a coordinator and ranks: a whole group, or its first pod. */}}
{{- define "lockstep.leaderSpec" -}}
{{ include "lockstep.podSpec" (dict "root" . "of" .Values.workers "components" (list "replica" "workers") "grace" (include "lockstep.grace" .)) }}
{{- include "lockstep.rankPod" . }}
initContainers:
  {{- with include "lockstep.modelInit" . }}
  {{- . | trim | nindent 2 }}
  {{- end }}
  {{- $join := printf "%s:%v" (ternary "[::1]" "127.0.0.1" (eq .Values.network.ipFamily "IPv6")) .Values.network.coordinatorPort }}
  {{- range $n := until (include "lockstep.ranksPerPod" . | int) }}
  {{- include "lockstep.rankContainer" (dict "root" $ "n" $n "join" $join "isSidecar" true "fetches" false) | nindent 2 }}
  {{- end }}
containers:
  {{- include "lockstep.coordinatorContainer" . | nindent 2 }}
volumes:
  {{- include "lockstep.rankVolumes" . | nindent 2 }}
  {{- with include "lockstep.etcdVolumes" . }}
  {{- . | trim | nindent 2 }}
  {{- end }}
  {{- with include "lockstep.extraVolumes" (list .Values.coordinator .Values.workers) }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* The spec of a pod with ranks alone: (dict "root" $ "join" "HOST:PORT") */}}
{{- define "lockstep.followerSpec" -}}
{{- $fetches := eq .root.Values.model.source "hub" -}}
{{ include "lockstep.podSpec" (dict "root" .root "of" .root.Values.workers "components" (list "replica" "workers") "grace" (include "lockstep.workerGrace" .root)) }}
{{- include "lockstep.rankPod" .root }}
containers:
  {{- range $n := until (include "lockstep.ranksPerPod" .root | int) }}
  {{- include "lockstep.rankContainer" (dict "root" $.root "n" $n "join" $.join "isSidecar" false "fetches" $fetches) | nindent 2 }}
  {{- end }}
volumes:
  {{- include "lockstep.rankVolumes" .root | nindent 2 }}
  {{- with include "lockstep.extraVolumes" (list .root.Values.workers) }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end -}}
