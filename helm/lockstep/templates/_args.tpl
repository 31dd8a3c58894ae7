{{/* The arguments of each container, one flag on a line, without those of extraArgs. */}}

{{- define "lockstep.routerArgs" -}}
- router
- {{ include "lockstep.model" . | quote }}
{{ include "lockstep.doorArgs" . }}
{{- if include "lockstep.hasEtcd" . }}
{{ include "lockstep.etcdArgs" . | trim }}
{{- else }}
{{- range $group := until (include "lockstep.groupsMax" . | int) }}
- --coordinator={{ include "lockstep.coordinatorAddress" (dict "root" $ "group" $group) }}
{{- end }}
{{- range .Values.router.coordinators }}
- --coordinator={{ . }}
{{- end }}
{{- end }}
{{- range $name, $model := .Values.router.texts }}
- {{ printf "--text=%s=%s" $name $model | quote }}
{{- end }}
{{- if .Values.router.routes }}
- --routes=/etc/lockstep/routes/routes
{{- end }}
- --token-file=/etc/lockstep/join/token
{{ include "lockstep.limitArgs" . | trim }}
{{ include "lockstep.logArgs" . }}
{{- with .Values.router.policy }}
- --policy={{ . }}
{{- end }}
{{- end -}}

{{- define "lockstep.serveArgs" -}}
- serve
- {{ include "lockstep.model" . | quote }}
{{ include "lockstep.doorArgs" . }}
{{ include "lockstep.engineArgs" . | trim }}
{{- with .Values.engine.threads }}
- --threads={{ . | int64 }}
{{- end }}
{{- with .Values.engine.wire }}
- --wire={{ . }}
{{- end }}
{{- if not (kindIs "invalid" .Values.engine.linkEncryption) }}
- --link-encryption={{ ternary "on" "off" .Values.engine.linkEncryption }}
{{- end }}
{{- if not (kindIs "invalid" .Values.engine.scrub) }}
- --scrub={{ .Values.engine.scrub }}
{{- end }}
- --kv-commit={{ default "all" .Values.engine.kvCommit }}
{{- with .Values.engine.collective }}
- --collective={{ . }}
{{- end }}
{{ include "lockstep.limitArgs" . | trim }}
{{ include "lockstep.logArgs" . }}
{{- end -}}

{{- define "lockstep.coordinatorArgs" -}}
- coordinator
- {{ include "lockstep.model" . | quote }}
- --listen={{ include "lockstep.any" . }}:{{ .Values.network.coordinatorPort }}
- --health={{ include "lockstep.any" . }}:{{ .Values.network.healthPort }}
- --replica=$(POD_NAME)
{{- if include "lockstep.hasEtcd" . }}
- --advertise=$(POD_NAME).{{ include "lockstep.coordinatorHolder" . }}.{{ .Release.Namespace }}.svc:{{ .Values.network.coordinatorPort }}
{{ include "lockstep.etcdArgs" . | trim }}
{{- end }}
- --token-file=/etc/lockstep/join/token
{{ include "lockstep.engineArgs" . | trim }}
{{ include "lockstep.limitArgs" . | trim }}
{{ include "lockstep.logArgs" . }}
{{- end -}}

{{/* (dict "root" $ "n" 0 "join" "HOST:PORT" "fetches" false), with the meanings of lockstep.rankContainer. */}}
{{- define "lockstep.rankArgs" -}}
{{- $values := .root.Values -}}
{{- $perPod := include "lockstep.ranksPerPod" .root | int -}}
{{- $limits := default (dict) $values.workers.resources.limits -}}
- worker
- --join={{ .join }}
# Also to the coordinator of the same pod, which listens on all addresses.
- --tls=on
- --token-file=/etc/lockstep/join/token
- --mesh-listen={{ include "lockstep.podIp" .root }}:{{ add $values.network.meshPort .n }}
- --health={{ include "lockstep.any" .root }}:{{ add $values.network.healthPort 1 .n }}
- --device={{ $values.device }}{{ if and (eq $values.device "cuda") $values.gpu.dra.enabled }}:{{ .n }}{{ end }}
{{- if .fetches }}
- --fetch
{{- end }}
{{- /* A rank with its own GPU does not share the memory that --local-workers divides. */}}
{{- if and (gt $perPod 1) (not $limits.cpu) (ne $values.device "cuda") }}
- --local-workers={{ $perPod }}
{{- end }}
{{- with $values.engine.threads }}
- --threads={{ . | int64 }}
{{- end }}
{{- with $values.engine.wire }}
- --wire={{ . }}
{{- end }}
{{- if not (kindIs "invalid" $values.engine.linkEncryption) }}
- --link-encryption={{ ternary "on" "off" $values.engine.linkEncryption }}
{{- end }}
{{- if not (kindIs "invalid" $values.engine.scrub) }}
- --scrub={{ $values.engine.scrub }}
{{- end }}
{{- with $values.engine.kvCommit }}
- --kv-commit={{ . }}
{{- end }}
{{- with $values.engine.collective }}
- --collective={{ . }}
{{- end }}
{{ include "lockstep.logArgs" .root }}
{{- end -}}
