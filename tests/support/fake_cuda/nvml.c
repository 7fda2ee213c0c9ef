/* A fake of libnvidia-ml.so.1 on the node of node.h: names, memory, processes and MIG devices.

   As NVML does, it knows nothing of CUDA_VISIBLE_DEVICES. A handle is the place of a device in the
   file `devices`, from 1 on. */
#include "node.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
	INSUFFICIENT_SIZE = 7 };

typedef void *Handle;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } Process;

static int started;
static Device here[GPUS];
static int count;

static Device *of(Handle handle)
{
	intptr_t place = (intptr_t)handle - 1;
	count = node_devices(here);
	return place >= 0 && place < count ? here + place : NULL;
}

#define ENTER if (!started) return UNINITIALIZED
#define DEVICE ENTER; Device *at = of(device); if (!at) return INVALID_ARGUMENT

API int nvmlInit_v2(void) { started++; return SUCCESS; }
API int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
API int nvmlShutdown(void) { ENTER; started--; return SUCCESS; }

API const char *nvmlErrorString(int status)
{
	return status == SUCCESS ? "Success" : status == NOT_FOUND ? "Not Found" : "Error";
}

static int text(char *out, unsigned size, const char *from)
{
	return (unsigned)snprintf(out, size, "%s", from) < size ? SUCCESS : INSUFFICIENT_SIZE;
}

API int nvmlSystemGetDriverVersion(char *out, unsigned size) { ENTER; return text(out, size, "580.1"); }
API int nvmlSystemGetNVMLVersion(char *out, unsigned size) { ENTER; return text(out, size, "13.580.1"); }
API int nvmlSystemGetCudaDriverVersion_v2(int *out) { ENTER; *out = 13000; return SUCCESS; }

API int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size)
{
	ENTER;
	char path[64], line[256] = "";
	snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
	FILE *file = fopen(path, "r");
	if (!file)
		return NOT_FOUND;
	if (!fread(line, 1, sizeof line - 1, file))
		*line = 0;
	fclose(file);
	return text(out, size, line);
}

/* GPUs have indices; MIG devices have not. */
API int nvmlDeviceGetCount_v2(unsigned *out)
{
	ENTER;
	*out = 0;
	count = node_devices(here);
	for (int i = 0; i < count; i++)
		*out += !here[i].is_mig;
	return SUCCESS;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *out)
{
	ENTER;
	count = node_devices(here);
	for (int i = 0; i < count; i++)
		if (!here[i].is_mig && !index--) {
			*out = (Handle)(intptr_t)(i + 1);
			return SUCCESS;
		}
	return INVALID_ARGUMENT;
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, Handle *out)
{
	ENTER;
	Uuid wanted;
	count = node_devices(here);
	int at = node_parse(uuid, &wanted) == 16 ? node_find(here, count, &wanted) : -1;
	if (at < 0)
		return NOT_FOUND;
	*out = (Handle)(intptr_t)(at + 1);
	return SUCCESS;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, Handle *out)
{
	ENTER;
	unsigned domain, bus;
	count = node_devices(here);
	if (sscanf(id, "%x:%x:", &domain, &bus) != 2 || !bus || (int)bus > count)
		return NOT_FOUND;
	*out = (Handle)(intptr_t)bus;
	return SUCCESS;
}

API int nvmlDeviceGetIndex(Handle device, unsigned *out)
{
	DEVICE;
	*out = 0;
	for (Device *each = here; each < at; each++)
		*out += !each->is_mig;
	return SUCCESS;
}

API int nvmlDeviceGetUUID(Handle device, char *out, unsigned size)
{
	DEVICE;
	const unsigned char *b = at->uuid.bytes;
	char line[64];
	snprintf(line, sizeof line,
		"%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
		at->is_mig ? "MIG" : "GPU", b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9],
		b[10], b[11], b[12], b[13], b[14], b[15]);
	return text(out, size, line);
}

API int nvmlDeviceGetName(Handle device, char *out, unsigned size) { DEVICE; return text(out, size, at->name); }

API int nvmlDeviceGetMemoryInfo(Handle device, Memory *out)
{
	DEVICE;
	uint64_t used = node_used(at);
	*out = (Memory){at->bytes, used < at->bytes ? at->bytes - used : 0, used};
	return SUCCESS;
}

API int nvmlDeviceGetMemoryInfo_v2(Handle device, MemoryV2 *out)
{
	Memory found;
	int status = nvmlDeviceGetMemoryInfo(device, &found);
	if (!status)
		*out = (MemoryV2){out->version, found.total, 0, found.free, found.used};
	return status;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(Handle device, unsigned *size, Process *out)
{
	DEVICE;
	Holder found[256];
	unsigned most = *size;
	*size = node_holders(at, found, 256);
	if (*size > most)
		return INSUFFICIENT_SIZE;
	for (unsigned i = 0; i < *size; i++)
		out[i] = (Process){found[i].pid, found[i].bytes, ~0u, ~0u};
	return SUCCESS;
}

static int child(Device *parent, unsigned index)
{
	for (int i = 0; i < count; i++)
		if (here[i].is_mig && !memcmp(&here[i].of, &parent->uuid, sizeof(Uuid)) && !index--)
			return i + 1;
	return 0;
}

API int nvmlDeviceIsMigDeviceHandle(Handle device, unsigned *out) { DEVICE; *out = at->is_mig; return SUCCESS; }

API int nvmlDeviceGetMigMode(Handle device, unsigned *now, unsigned *pending)
{
	DEVICE;
	*now = *pending = child(at, 0) > 0;
	return SUCCESS;
}

API int nvmlDeviceGetMaxMigDeviceCount(Handle device, unsigned *out)
{
	DEVICE;
	*out = child(at, 0) ? 7 : 0;
	return SUCCESS;
}

API int nvmlDeviceGetMigDeviceHandleByIndex(Handle device, unsigned index, Handle *out)
{
	DEVICE;
	int found = child(at, index);
	*out = (Handle)(intptr_t)found;
	return found ? SUCCESS : NOT_FOUND;
}

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Handle device, Handle *out)
{
	DEVICE;
	int parent = at->is_mig ? node_find(here, count, &at->of) : -1;
	*out = (Handle)(intptr_t)(parent + 1);
	return parent < 0 ? INVALID_ARGUMENT : SUCCESS;
}
