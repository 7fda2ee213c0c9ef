{{/* What the names of all objects begin with. */}}
{{- define "snapback.name" -}}
{{- if contains "snapback" .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-snapback" .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "snapback.natsUrl" -}}
{{ .Values.nats.url | default (printf "nats://%s-nats.%s.svc:4222" (include "snapback.name" .) .Release.Namespace) }}
{{- end -}}

{{/* Labels that select pods: a list of the root and the component. */}}
{{- define "snapback.selector" -}}
app.kubernetes.io/name: snapback
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "snapback.labels" -}}
{{ include "snapback.selector" . }}
app.kubernetes.io/part-of: snapback
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: snapback-{{ (index . 0).Chart.Version }}
{{- end -}}

{{/* The reference to an image: a list of the root, its name, and a whole reference or nothing. */}}
{{- define "snapback.reference" -}}
{{- $image := (index . 0).Values.image -}}
{{- $variant := and $image.cuda (has (index . 1) (list "gms" "snapshot-agent")) | ternary "-cuda" "" -}}
{{ index . 2 | default (printf "%s/%s:%s%s" $image.repository (index . 1) ($image.tag | default (index . 0).Chart.AppVersion) $variant) | quote }}
{{- end -}}

{{/* The image of a container, from the same. */}}
{{- define "snapback.image" -}}
image: {{ include "snapback.reference" . }}
imagePullPolicy: {{ (index . 0).Values.image.pullPolicy }}
{{- end -}}

{{- define "snapback.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "snapback.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Of a pod without a right on its node. */}}
{{- define "snapback.user" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
# Of the group are the volumes: those of Secrets are readable.
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* The settings of every service: a list of the root, its ports for metrics and health, and more settings. */}}
{{- define "snapback.environment" -}}
{{- $root := index . 0 -}}
- {name: SNAPBACK_WORLD, value: kubernetes}
- {name: SNAPBACK_NATS_URL, value: {{ include "snapback.natsUrl" $root | quote }}}
- {name: SNAPBACK_NATS_CREDENTIALS, value: /var/lib/snapback/keys/seed.nk}
- {name: SNAPBACK_HTTP_ADDRESS, value: "0.0.0.0:{{ index . 1 }}"}
- {name: SNAPBACK_HEALTH_ADDRESS, value: "0.0.0.0:{{ index . 2 }}"}
- {name: SNAPBACK_LOG_LEVEL, value: {{ $root.Values.logLevel }}}
{{- with $root.Values.otlpEndpoint }}
- {name: SNAPBACK_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- range $name, $value := index . 3 }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end -}}

{{/* A process that does not answer at all is started again; one that waits for NATS is only not ready. */}}
{{- define "snapback.probes" -}}
readinessProbe:
  httpGet: {path: /readyz, port: {{ . }}}
  periodSeconds: 3
  timeoutSeconds: 3
  failureThreshold: 3
livenessProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  initialDelaySeconds: 30
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{/* The seccomp profile of workers for CRIU, below the kubelet's folder; empty if they get none. */}}
{{- define "snapback.seccompProfile" -}}
{{- if not .Values.checkpoint.seccomp.disabled }}{{ .Values.checkpoint.seccomp.profile }}{{ end }}
{{- end -}}

{{/* Who may reach a port, of a NetworkPolicy: everybody if the list is empty. */}}
{{- define "snapback.from" -}}
{{- with . -}}
from: {{ toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* Annotations of what is there only before an install or upgrade, by its place in their order. */}}
{{- define "snapback.hook" -}}
helm.sh/hook: pre-install,pre-upgrade
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{- define "snapback.uninstallHook" -}}
helm.sh/hook: {{ index . 0 }}
helm.sh/hook-weight: {{ index . 1 | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{/* Where the pods of nodes are. */}}
{{- define "snapback.placement" -}}
{{- with .Values.node.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.node.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Of a pod of a node: its folders belong to root. */}}
{{- define "snapback.root" -}}
runAsUser: 0
runAsGroup: 0
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Makes the keys of a node, where it lacks them, and reports the public ones. */}}
{{- define "snapback.nodeKeys" -}}
- name: keys
  {{- include "snapback.image" (list . "snapshot-agent" .Values.node.agent.image) | nindent 2 }}
  securityContext:
    {{- include "snapback.confined" . | nindent 4 }}
    seccompProfile: {type: RuntimeDefault}
  command: [sh, -c, "python -P -m snapshot_shared.nkey /keys agent gms >/dev/termination-log"]
  terminationMessagePolicy: FallbackToLogsOnError
  volumeMounts:
    - {name: keys, mountPath: /keys}
{{- end -}}

{{- define "snapback.nodeKeysVolume" -}}
- name: keys
  hostPath: {path: /var/lib/snapback/keys, type: DirectoryOrCreate}
{{- end -}}

{{/* Where the API server reaches the webhooks. */}}
{{- define "snapback.webhookClient" -}}
{{- if .Values.webhooks.url -}}
url: {{ trimSuffix "/" .Values.webhooks.url | quote }}
{{- else -}}
service:
  namespace: {{ .Release.Namespace }}
  name: {{ include "snapback.name" . }}-webhook
  port: 443
{{- end -}}
{{- end -}}

{{/* What all webhooks have, by what happens where none answers. */}}
{{- define "snapback.webhook" -}}
admissionReviewVersions: [v1]
failurePolicy: {{ . }}
matchPolicy: Equivalent
sideEffects: None
timeoutSeconds: 5
{{- end -}}
