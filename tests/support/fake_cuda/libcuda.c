/* A fake of libcuda.so.1: devices and process checkpointing, with the rules of its documentation and
   the habits that were seen of drivers 580 and 595. Memory is in memory.c, the node in node.c.

   The state of a process lies in a memory file that it has open, so it outlives a caller that is
   killed, as it does in the driver, and CRIU carries it along: a checkpoint or restore that has
   begun goes on without its caller, and a query of the state waits for its end. A process that has
   called cuInit is a CUDA process. Calls are written to `calls` in the folder FAKE_CUDA. `faults`
   there has a line `VERB PID KIND VALUE` for each fault (PID may be 0 for all):
     error N  return N, with no effect        fail N  return N, and the process has failed
     hang     never return, with no effect    late    take effect, and never return
     slow MS  take effect after MS            busy    the device is at work for ever (lock)
     oom      the first restore runs out of memory, and no later one works
   A process that is stopped lets its callers wait until it goes on, which `calls` has as `stopped`.
   With FAKE_CUDA_DEVICE a process has that device file open, except while it is checkpointed.
   Any other call can be a verb, by its name (cuMemCreate), with the kinds error, hang and slow; and
   `cuMemAddressReserve 0 nohint` lets the driver choose all addresses itself. */
#define _GNU_SOURCE
#include "fake.h"
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define NAME "fake-cuda"

enum { RUNNING, LOCKED, CHECKPOINTED, FAILED };
typedef struct { unsigned timeout_ms, reserved0; uint64_t reserved1[7]; } LockArgs;
typedef struct { Uuid old, new; } Pair;
typedef struct { Pair *pairs; unsigned count; char reserved[52]; } RestoreArgs;

typedef struct {
	int state, next, gpus, broken;
	int imports;  /* of memory that other processes may have, too */
	volatile int holds, open;  /* whether it has the device file open, when it has the device */
	uint64_t due;  /* nanoseconds of the monotonic clock, 0 when nothing is under way */
	Uuid gpu[GPUS];
} Entry;

typedef struct { int pid, fd; uint64_t start; Entry *entry; } State;

/* This process itself, the other process whose state is mapped, and the one of both in question. */
static State own = {.fd = -1};
static __thread State other = {.fd = -1};
static __thread State *at = &own;
static int initialized;

Device visible[GPUS];
int visibles;

static Entry *mapped(int fd)
{
	Entry *found = mmap(0, sizeof(Entry), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (found == MAP_FAILED)
		abort();
	return found;
}

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void nap(void) { usleep(5000); }
static void for_ever(void) { for (;;) pause(); }

/* The state letter of a process and its start time; 0 when it is gone. */
static char kernel(int pid, uint64_t *start)
{
	char path[64], line[1024] = "", *at, letter;
	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	if (read(fd, line, sizeof line - 1) <= 0) {
		close(fd);
		return 0;
	}
	close(fd);
	at = strrchr(line, ')') + 2;
	letter = *at;
	for (int field = 3; field < 22; field++)
		at = strchr(at, ' ') + 1;
	*start = strtoull(at, 0, 10);
	return letter;
}

/* Open the state of a process; -1 when it is none of CUDA. */
static int state_of(int pid)
{
	char path[4096], link[64];
	snprintf(path, sizeof path, "/proc/%d/fd", pid);
	DIR *folder = opendir(path);
	struct dirent *each;
	int found = -1;
	while (folder && found < 0 && (each = readdir(folder))) {
		ssize_t size = readlinkat(dirfd(folder), each->d_name, link, sizeof link);
		if (size > 0 && !strncmp(link, "/memfd:" NAME, strlen("/memfd:" NAME)))
			found = openat(dirfd(folder), each->d_name, O_RDWR | O_CLOEXEC);
	}
	if (folder)
		closedir(folder);
	return found;
}

/* Let go of the state of the other process that was asked about last. */
static void forget(void)
{
	if (other.entry) {
		munmap(other.entry, sizeof *other.entry);
		close(other.fd);
	}
	other = (State){.fd = -1};
}

/* The state of a process, locked; or NULL. What has come to its end is noted. */
static Entry *take(int pid)
{
	uint64_t start;
	char letter = kernel(pid, &start);
	if (!letter || letter == 'Z')
		return NULL;
	if (own.entry && pid == getpid()) {
		at = &own;
	} else {
		at = &other;
		if (other.pid != pid || other.start != start) {
			int fd = state_of(pid);
			forget();
			if (fd < 0)
				return NULL;
			other = (State){pid, fd, start, mapped(fd)};
		}
	}
	flock(at->fd, LOCK_EX);
	if (at->entry->due && at->entry->due <= now()) {
		at->entry->state = at->entry->next;
		at->entry->due = 0;
	}
	return at->entry;
}

static void leave(void)
{
	if (at->fd >= 0)
		flock(at->fd, LOCK_UN);
}

static void *hold_device(void *path)
{
	int fd = -1;
	for (;; nap()) {
		int wanted = own.entry->state != CHECKPOINTED;
		if (wanted && fd < 0)
			fd = open(path, O_WRONLY | O_CLOEXEC);
		if (!wanted && fd >= 0) {
			close(fd);
			fd = -1;
		}
		own.entry->open = fd >= 0;
	}
	return NULL;
}

/* Be a process of CUDA from here on. */
static void enter(void)
{
	pthread_t thread;
	char *device = getenv("FAKE_CUDA_DEVICE");
	if (own.entry)
		return;
	own.fd = memfd_create(NAME, MFD_CLOEXEC);
	if (own.fd < 0 || ftruncate(own.fd, sizeof(Entry)))
		abort();
	own.entry = mapped(own.fd);
	if (device && !access(device, W_OK) && !pthread_create(&thread, NULL, hold_device, device))
		own.entry->holds = 1;
}

static void note(const char *format, const char *verb, int pid, int value)
{
	char line[128];
	int fd = node_open("calls", O_WRONLY | O_CREAT | O_APPEND);
	int size = snprintf(line, sizeof line, format, verb, pid, value);
	if (write(fd, line, size) != size)
		abort();
	close(fd);
}

/* The fault of a call, or an empty word. */
int fault(const char *verb, int pid, char *kind)
{
	char line[128], its[64];
	int who, value = 0, fd = node_open("faults", O_RDONLY);
	FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
	*kind = 0;
	while (file && fgets(line, sizeof line, file)) {
		char word[16] = "";
		int number = 0;
		if (sscanf(line, "%63s %d %15s %d", its, &who, word, &number) >= 3 &&
		    !strcmp(its, verb) && (!who || who == pid)) {
			strcpy(kind, word);
			value = number;
		}
	}
	if (file)
		fclose(file);
	return value;
}

/* The uuids of the node. */
static int devices(Uuid *out)
{
	Device found[GPUS];
	int count = node_devices(found);
	for (int i = 0; i < count; i++)
		out[i] = found[i].uuid;
	return count;
}

static int has(const Uuid *list, int count, const Uuid *one)
{
	for (int i = 0; i < count; i++)
		if (!memcmp(list + i, one, sizeof *one))
			return i;
	return -1;
}

static int is_stopped(int pid)
{
	uint64_t start;
	char letter = kernel(pid, &start);
	return letter == 'T' || letter == 't';
}

/* Which error keeps a call from having any effect; `e` is not NULL, and locked, when none does. */
static int known(int pid, Entry **e)
{
	uint64_t start;
	char letter;
	if (!initialized)
		return NOT_INITIALIZED;
	*e = take(pid);
	if (*e)
		return SUCCESS;
	letter = kernel(pid, &start);
	return letter && letter != 'Z' ? NOT_INITIALIZED : OPERATING_SYSTEM;
}

/* Wait until nothing is under way in a process, and lock its state. */
static int settled(const char *verb, int pid, Entry **e)
{
	int status;
	if (is_stopped(pid))
		note("stopped %s %d %d\n", verb, pid, 0);
	for (;; nap()) {
		while (is_stopped(pid))
			nap();
		status = known(pid, e);
		if (status || (!(*e)->due && (!(*e)->holds || (*e)->open == ((*e)->state != CHECKPOINTED))))
			return status;
		leave();
	}
}

/* Bring a process from one state to the next; `apply`, or NULL, is called before and may refuse. */
static int move(const char *verb, int pid, int from, int to, int value, int (*apply)(Entry *, void *),
		void *with)
{
	char kind[16];
	Entry *e = NULL;
	int number = fault(verb, pid, kind), status;
	note("begin %s %d %d\n", verb, pid, value);
	if (!strcmp(kind, "hang"))
		for_ever();
	status = settled(verb, pid, &e);
	if (!status && !strcmp(kind, "error"))
		status = number;
	if (!status && !strcmp(kind, "fail")) {
		e->state = FAILED;
		status = number;
	}
	if (!status && e->state != from)
		status = ILLEGAL_STATE;
	if (!status && e->broken)
		status = OPERATING_SYSTEM;
	if (!status && !strcmp(kind, "oom")) {
		e->broken = 1;
		status = OUT_OF_MEMORY;
	}
	if (!status && apply)
		status = apply(e, with);
	if (!status) {
		e->next = to;
		e->due = now() + (!strcmp(kind, "slow") ? number * 1000000ull : 0);
		leave();
		status = settled(verb, pid, &e);
	}
	leave();
	if (!status && !strcmp(kind, "late"))
		for_ever();
	note("end %s %d %d\n", verb, pid, status);
	return status;
}

API int cuCheckpointProcessLock(int pid, LockArgs *args)
{
	char kind[16];
	unsigned limit = args ? args->timeout_ms : 0;
	LockArgs zero = {.timeout_ms = limit};
	if (args && memcmp(args, &zero, sizeof zero))
		return INVALID_VALUE;
	fault("lock", pid, kind);
	if (strcmp(kind, "busy"))
		return move("lock", pid, RUNNING, LOCKED, limit, NULL, NULL);
	note("begin %s %d %d\n", "lock", pid, limit);
	if (!limit)
		for_ever();
	usleep(limit * 1000);
	note("end %s %d %d\n", "lock", pid, NOT_READY);
	return NOT_READY;
}

API int cuCheckpointProcessCheckpoint(int pid, void *args)
{
	return move("checkpoint", pid, LOCKED, CHECKPOINTED, 0, NULL, NULL);
}

static int placed(Entry *e, void *with)
{
	RestoreArgs *args = with;
	Uuid here[GPUS], old[GPUS], chosen[GPUS];
	int count = devices(here), pairs = args ? args->count : 0;
	/* Of memory that is imported 580.159.04 makes a checkpoint, and refuses to restore it. */
	if (e->imports)
		return NOT_SUPPORTED;
	for (int i = 0; i < pairs; i++)
		old[i] = args->pairs[i].old;
	for (int i = 0; i < e->gpus; i++) {
		int at = pairs ? has(old, pairs, e->gpu + i) : -1;
		if (pairs && at < 0)
			return INVALID_VALUE;
		chosen[i] = pairs ? args->pairs[at].new : e->gpu[i];
		if (has(here, count, chosen + i) < 0 || has(chosen, i, chosen + i) >= 0)
			return INVALID_VALUE;
	}
	memcpy(e->gpu, chosen, sizeof(Uuid) * e->gpus);
	return SUCCESS;
}

API int cuCheckpointProcessRestore(int pid, RestoreArgs *args)
{
	return move("restore", pid, CHECKPOINTED, LOCKED, args ? args->count : 0, placed, args);
}

API int cuCheckpointProcessUnlock(int pid, void *args)
{
	return move("unlock", pid, LOCKED, RUNNING, 0, NULL, NULL);
}

API int cuCheckpointProcessGetState(int pid, int *state)
{
	char kind[16];
	Entry *e = NULL;
	int number = fault("state", pid, kind), status;
	if (!strcmp(kind, "hang"))
		for_ever();
	status = settled("state", pid, &e);
	if (!status && !strcmp(kind, "error"))
		status = number;
	if (!status)
		*state = e->state;
	leave();
	return status;
}

API int cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
	char kind[16];
	Entry *e = NULL;
	int number = fault("thread", pid, kind), status;
	if (!strcmp(kind, "hang"))
		for_ever();
	if (is_stopped(pid))
		note("stopped %s %d %d\n", "thread", pid, 0);
	status = known(pid, &e);
	leave();
	if (!status && !strcmp(kind, "error"))
		status = number;
	if (!status)
		*tid = pid;
	return status;
}

static int copy_visible(const Device *here, int one)
{
	visible[visibles++] = here[one];
	return visibles;
}

static int children(const Device *here, int count, int parent)
{
	for (int i = 0; i < count; i++)
		if (here[i].is_mig && !memcmp(&here[i].of, &here[parent].uuid, sizeof(Uuid)))
			return i;
	return -1;
}

/* The device that an entry of CUDA_VISIBLE_DEVICES names: an index among GPUs, or a uuid whose
   beginning is enough where it is that of one device alone. -1 for none. */
static int named(const Device *here, int count, char *word)
{
	char *end;
	int found = -1, is_mig = !strncmp(word, "MIG-", 4);
	if (strncmp(word, "GPU-", 4) && !is_mig) {
		long index = strtol(word, &end, 10);
		for (int i = 0; end > word && index >= 0 && i < count; i++)
			if (!here[i].is_mig && !index--)
				return i;
		return -1;
	}
	for (int i = 0; i < count; i++) {
		char text[33] = "", wanted[64] = "";
		for (int b = 0; b < 16; b++)
			sprintf(text + 2 * b, "%02x", here[i].uuid.bytes[b]);
		for (char *c = word + 4; *c && strlen(wanted) < 32; c++)
			if (*c != '-')
				strncat(wanted, c, 1);
		if (here[i].is_mig == is_mig && *wanted && !strncmp(text, wanted, strlen(wanted))) {
			if (found >= 0)
				return -1;
			found = i;
		}
	}
	return found;
}

/* See the devices as CUDA_VISIBLE_DEVICES has them: what follows an entry that names none is not
   seen, and nothing is when one is named twice. A process sees one MIG device, or whole GPUs. */
static void look(void)
{
	Device here[GPUS];
	char *setting = getenv("CUDA_VISIBLE_DEVICES"), words[1024], *rest, *word;
	int count = node_devices(here), chosen[GPUS], n = 0, mig = -1;
	visibles = 0;
	if (setting) {
		snprintf(words, sizeof words, "%s", setting);
		for (word = strtok_r(words, ",", &rest); word && n < GPUS; word = strtok_r(NULL, ",", &rest)) {
			int one = named(here, count, word + strspn(word, " "));
			if (one < 0)
				break;
			for (int i = 0; i < n; i++)
				if (chosen[i] == one)
					return;
			chosen[n++] = one;
		}
	} else {
		for (int i = 0; i < count; i++)
			if (!here[i].is_mig)
				chosen[n++] = i;
	}
	for (int i = 0; i < n; i++) {
		int child = here[chosen[i]].is_mig ? chosen[i] : children(here, count, chosen[i]);
		if (child < 0)
			copy_visible(here, chosen[i]);
		else if (mig < 0)
			mig = child;
	}
	if (mig >= 0 && (!visibles || here[chosen[0]].is_mig)) {
		visibles = 0;
		copy_visible(here, mig);
	}
}

API int cuInit(unsigned flags)
{
	ENTER;
	if (flags)
		return INVALID_VALUE;
	if (!initialized)
		look();
	if (!visibles)
		return NO_DEVICE;
	enter();
	initialized = 1;
	return SUCCESS;
}

API int cuDriverGetVersion(int *version)
{
	ENTER;
	*version = 13000;
	return SUCCESS;
}

API int cuDeviceGetCount(int *count)
{
	ENTER;
	*count = visibles;
	return SUCCESS;
}

API int cuDeviceGet(int *device, int ordinal)
{
	ENTER;
	*device = ordinal;
	return ordinal >= 0 && ordinal < visibles ? SUCCESS : INVALID_DEVICE;
}

#define DEVICE ENTER; if (device < 0 || device >= visibles) return INVALID_DEVICE

API int cuDeviceGetUuid_v2(Uuid *uuid, int device)
{
	DEVICE;
	*uuid = visible[device].uuid;
	return SUCCESS;
}

/* The older one has the uuid of the GPU for a MIG device. */
API int cuDeviceGetUuid(Uuid *uuid, int device)
{
	DEVICE;
	*uuid = visible[device].is_mig ? visible[device].of : visible[device].uuid;
	return SUCCESS;
}

API int cuDeviceGetName(char *name, int size, int device)
{
	DEVICE;
	snprintf(name, size, "%s", visible[device].name);
	return SUCCESS;
}

API int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
	DEVICE;
	*bytes = visible[device].bytes;
	return SUCCESS;
}

static int place_of(int device)
{
	Device here[GPUS];
	int count = node_devices(here);
	return node_find(here, count, visible[device].is_mig ? &visible[device].of : &visible[device].uuid);
}

API int cuDeviceGetAttribute(int *value, int attribute, int device)
{
	DEVICE;
	switch (attribute) {
	case 33: *value = place_of(device) + 1; break;  /* the PCI bus */
	case 75: *value = 9; break;  /* the compute capability is 9.0 */
	case 102: *value = visible[device].vmm; break;
	case 103: *value = visible[device].posix; break;
	case 110: case 116: *value = visible[device].rdma != 0; break;
	case 128: *value = visible[device].fabric != 0; break;
	default: *value = attribute == 41;  /* one address space with the host */
	}
	return SUCCESS;
}

API int cuDeviceGetPCIBusId(char *id, int size, int device)
{
	DEVICE;
	snprintf(id, size, "0000:%02x:00.0", place_of(device) + 1);
	return SUCCESS;
}

/* Of a device that this process makes a context on, its checkpoints have the memory. */
void on_device(int device)
{
	Entry *e = take(getpid());
	if (has(e->gpu, e->gpus, &visible[device].uuid) < 0)
		e->gpu[e->gpus++] = visible[device].uuid;
	leave();
}

void tell_imports(int count)
{
	if (own.entry)
		own.entry->imports = count;
}

/* Wait while this process is locked; the status of a call when a restore of it has failed. Without
   the lock of its state, for any thread may be here. */
int while_locked(void)
{
	volatile Entry *e = own.entry;
	for (;; nap()) {
		int state = !e->due ? e->state : e->due <= now() ? e->next : LOCKED;
		if (state == RUNNING || state == FAILED)
			return state == RUNNING ? SUCCESS : LAUNCH_FAILED;
	}
}

API int cuGetErrorName(int status, const char **name)
{
	static const struct { int status; const char *name; } names[] = {
		{SUCCESS, "CUDA_SUCCESS"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
		{NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"}, {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE"},
		{NOT_READY, "CUDA_ERROR_NOT_READY"}, {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM"},
		{OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"}, {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
		{INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
		{ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {0, NULL},
	};
	for (int i = 0; names[i].name; i++)
		if (names[i].status == status) {
			*name = names[i].name;
			return SUCCESS;
		}
	return INVALID_VALUE;
}

API int cuGetErrorString(int status, const char **text) { return cuGetErrorName(status, text); }

API int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags);
API int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *symbol);

static Call calls[] = {
#define CALL(name) {#name, name, NULL, 0, 0}
	CALL(cuInit), CALL(cuDriverGetVersion), CALL(cuDeviceGetCount), CALL(cuDeviceGet),
	{"cuDeviceGetUuid", cuDeviceGetUuid_v2, cuDeviceGetUuid, 11040, 0}, CALL(cuDeviceGetName),
	{"cuDeviceTotalMem", cuDeviceTotalMem_v2, NULL, 0, 0}, CALL(cuDeviceGetAttribute),
	CALL(cuDeviceGetPCIBusId), {"cuGetProcAddress", cuGetProcAddress_v2, cuGetProcAddress, 12000, 0},
	CALL(cuGetErrorName), CALL(cuGetErrorString),
	CALL(cuCheckpointProcessLock), CALL(cuCheckpointProcessCheckpoint),
	CALL(cuCheckpointProcessRestore), CALL(cuCheckpointProcessUnlock),
	CALL(cuCheckpointProcessGetState), CALL(cuCheckpointProcessGetRestoreThreadId),
	{NULL, NULL, NULL, 0, 0},
};

static Call *call_of(const char *name, size_t size)
{
	Call *tables[] = {calls, memory_calls};
	for (int t = 0; t < 2; t++)
		for (Call *each = tables[t]; each->name; each++)
			if (strlen(each->name) == size && !strncmp(each->name, name, size))
				return each;
	return NULL;
}

int entered(const char *function)
{
	char kind[16], *suffix = strstr(function, "_v2");
	Call *call = call_of(function, suffix ? (size_t)(suffix - function) : strlen(function));
	if (!call)
		abort();
	__atomic_add_fetch(&call->count, 1, __ATOMIC_RELAXED);
	if (!initialized && call->call != cuInit && call->call != cuDriverGetVersion)
		return NOT_INITIALIZED;
	int value = fault(call->name, getpid(), kind);
	if (!strcmp(kind, "hang"))
		for_ever();
	if (!strcmp(kind, "slow"))
		usleep(value * 1000);
	return strcmp(kind, "error") ? SUCCESS : value;
}

API int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *symbol)
{
	Call *call = call_of(name, strlen(name));
	*found = !call ? NULL : call->older && version < call->since ? call->older : call->call;
	if (symbol)
		*symbol = !*found;
	return *found ? SUCCESS : NOT_FOUND;
}

API int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags)
{
	return cuGetProcAddress_v2(name, found, version, flags, NULL);
}

/* For tests: how often this process has made a call. */
API long fakeCount(const char *name)
{
	Call *call = call_of(name, strlen(name));
	return call ? (long)call->count : -1;
}

/* For tests: this process is as if it had never used CUDA. */
API void fakeReset(void)
{
	memory_reset();
	for (Call *each = calls; each->name; each++)
		each->count = 0;
	for (Call *each = memory_calls; each->name; each++)
		each->count = 0;
	if (own.entry) {
		munmap(own.entry, sizeof *own.entry);
		close(own.fd);
		own = (State){.fd = -1};
	}
	if (other.pid == getpid())
		forget();
	initialized = visibles = 0;
}

/* For tests: the state of a process now, or -1. */
API int fakeState(int pid)
{
	Entry *e = take(pid);
	int state = e ? e->state : -1;
	leave();
	return state;
}

/* For tests: CUDA of one process is in another one now, which CRIU has restored from it. */
API int fakeMove(int from, int to)
{
	Entry copy, *e = take(from), *other;
	if (e)
		copy = *e;
	leave();
	other = e ? take(to) : NULL;
	if (other)
		*other = copy;
	leave();
	return other ? SUCCESS : INVALID_VALUE;
}

/* For tests: the number of a device of the node that a process is on first, or -1. */
API int fakeDevice(int pid)
{
	Uuid here[GPUS];
	int count = devices(here);
	Entry *e = take(pid);
	int found = e && e->gpus ? has(here, count, e->gpu) : -1;
	leave();
	return found;
}
