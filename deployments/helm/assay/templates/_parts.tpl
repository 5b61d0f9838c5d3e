{{- define "assay.labels" -}}
app.kubernetes.io/name: assay
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "assay.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "assay.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "assay.environment" -}}
- {name: PREFECT_API_URL, value: {{ required "prefect.apiUrl: the address of the Prefect server, as a pod reaches it" .Values.prefect.apiUrl | quote }}}
{{- with .Values.prefect.apiKeySecret }}
- name: PREFECT_API_KEY
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key | quote }}}}
{{- end }}
{{- range $variable, $secret := .Values.secrets }}
- name: {{ $variable }}
  valueFrom: {secretKeyRef: {name: {{ $secret.name }}, key: {{ $secret.key | quote }}}}
{{- end }}
{{- if .Values.regions }}
- {name: ASSAY_REGIONS, value: /etc/assay/regions/regions.yaml}
{{- end }}
{{- end }}

{{- define "assay.mounts" -}}
- {name: scratch, mountPath: /scratch}
- {name: tmp, mountPath: /tmp}
{{- if .Values.regions }}
- {name: regions, mountPath: /etc/assay/regions, readOnly: true}
{{- end }}
{{- end }}

{{- define "assay.volumes" -}}
- {name: tmp, emptyDir: {}}
{{- if .Values.regions }}
- {name: regions, configMap: {name: {{ .Release.Name }}-regions}}
{{- end }}
{{- end }}
