/* Contexts, virtual memory, copies and streams of the fake libcuda.so.1, with the rules that the
   documentation of the driver states.

   Where it promises nothing, this is unkind: new memory holds garbage, the processor cannot read
   what is mapped, a copy on a stream happens as late as it may, an access that is not allowed breaks
   the context for ever, and what the rules forbid is refused at once. */
#define _GNU_SOURCE
#include "fake.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRANULE (2ull << 20)
#define GARBAGE 0xa5
#define MOST 8192
#define READ 1
#define WRITE 3
#define POSIX 1
#define FABRIC 8

typedef unsigned long long Address;
typedef struct { int type, id; } Location;
typedef struct {
	int type, handles;
	Location location;
	void *windows;
	unsigned char compression, rdma;
	unsigned short usage;
	unsigned char reserved[4];
} Prop;
typedef struct { Location location; int flags; } Access;

typedef struct { Address number; int fd, device, is_import; size_t size; Prop prop; } Handle;
typedef struct { Address at; size_t size; } Range;
typedef struct { Address at; size_t size; void *alias; int flags, is_import; } Mapping;
typedef struct op { Address at; void *host; size_t size; int to_device; struct op *next; } Op;
typedef struct stream { Op *first, **last; int device; struct stream *next; } Stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Handle handles[MOST];
static Mapping mappings[MOST];
static Range reserved[MOST], pinned[MOST];
static int n_handles, n_mappings, n_reserved, n_pinned, n_streams;
static Stream *streams;
static int retained[GPUS], flags_of[GPUS], broken[GPUS], context_fd[GPUS];
static unsigned generation;
static __thread struct { unsigned generation; int depth; void *context[64]; } stack;

#define LOCKED(body) do { pthread_mutex_lock(&lock); int s_ = (body); pthread_mutex_unlock(&lock); \
	return s_; } while (0)

static void **current(void)
{
	if (stack.generation != generation) {
		stack.depth = 0;
		stack.generation = generation;
	}
	return stack.depth ? stack.context + stack.depth - 1 : NULL;
}

static int device_of(void *context)
{
	intptr_t device = (intptr_t)context - 1;
	return device >= 0 && device < visibles && retained[device] ? (int)device : -1;
}

/* The device of the current context, or -1 with the status that a call has to return. */
static int working(int *status)
{
	void **top = current();
	int device = top ? device_of(*top) : -1;
	*status = device < 0 ? INVALID_CONTEXT : broken[device] ? broken[device] : while_locked();
	return *status ? -1 : device;
}

#define CONTEXT int status_, device = working(&status_); if (device < 0) return status_

API int cuDevicePrimaryCtxRetain(void **context, int device)
{
	ENTER;
	if (device < 0 || device >= visibles)
		return INVALID_DEVICE;
	pthread_mutex_lock(&lock);
	if (!retained[device] && visible[device].context) {
		context_fd[device] = node_take(visible + device, visible[device].context);
		if (context_fd[device] < 0) {
			pthread_mutex_unlock(&lock);
			return OUT_OF_MEMORY;
		}
	}
	retained[device]++;
	on_device(device);
	pthread_mutex_unlock(&lock);
	*context = (void *)(intptr_t)(device + 1);
	return SUCCESS;
}

API int cuDevicePrimaryCtxRelease_v2(int device)
{
	ENTER;
	if (device < 0 || device >= visibles)
		return INVALID_DEVICE;
	if (!retained[device])
		return INVALID_CONTEXT;
	pthread_mutex_lock(&lock);
	if (!--retained[device] && visible[device].context)
		close(context_fd[device]);
	pthread_mutex_unlock(&lock);
	return SUCCESS;
}

API int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags)
{
	ENTER;
	if (device < 0 || device >= visibles)
		return INVALID_DEVICE;
	flags_of[device] = flags;
	return SUCCESS;
}

API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
	ENTER;
	if (device < 0 || device >= visibles)
		return INVALID_DEVICE;
	*flags = flags_of[device];
	*active = retained[device] > 0;
	return SUCCESS;
}

API int cuCtxPushCurrent_v2(void *context)
{
	ENTER;
	if (device_of(context) < 0)
		return INVALID_CONTEXT;
	current();
	stack.context[stack.depth++] = context;
	return SUCCESS;
}

API int cuCtxPopCurrent_v2(void **context)
{
	ENTER;
	void **top = current();
	if (!top)
		return INVALID_CONTEXT;
	if (context)
		*context = *top;
	stack.depth--;
	return SUCCESS;
}

API int cuCtxGetCurrent(void **context)
{
	ENTER;
	void **top = current();
	*context = top ? *top : NULL;
	return SUCCESS;
}

API int cuCtxSetCurrent(void *context)
{
	ENTER;
	void **top = current();
	if (context && device_of(context) < 0)
		return INVALID_CONTEXT;
	if (top)
		stack.depth--;
	if (context)
		stack.context[stack.depth++] = context;
	return SUCCESS;
}

API int cuCtxGetDevice(int *device_out)
{
	ENTER;
	CONTEXT;
	*device_out = device;
	return SUCCESS;
}

API int cuMemGetInfo_v2(size_t *free, size_t *total)
{
	ENTER;
	CONTEXT;
	uint64_t used = node_used(visible + device);
	*total = visible[device].bytes;
	*free = used < *total ? *total - used : 0;
	return SUCCESS;
}

static void count_imports(void)
{
	int count = 0;
	for (int i = 0; i < n_handles; i++)
		count += handles[i].is_import;
	for (int i = 0; i < n_mappings; i++)
		count += mappings[i].is_import;
	tell_imports(count);
}

static Handle *handle_of(Address number)
{
	for (int i = 0; i < n_handles; i++)
		if (handles[i].number == number)
			return handles + i;
	return NULL;
}

static Address add_handle(Handle one)
{
	static Address next = 0x10000;
	if (n_handles == MOST)
		abort();
	one.number = next++;
	handles[n_handles++] = one;
	return one.number;
}

static int fill(int fd, size_t size)
{
	void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (pages == MAP_FAILED)
		return OUT_OF_MEMORY;
	memset(pages, GARBAGE, size);
	munmap(pages, size);
	return SUCCESS;
}

/* Whether memory may be asked for so; the status of a call when it may not. */
static int permitted(const Prop *prop)
{
	int device = prop->location.id;
	if (prop->type != 1 || prop->location.type != 1 || prop->handles & ~(POSIX | FABRIC) || prop->windows)
		return INVALID_VALUE;
	if (device < 0 || device >= visibles)
		return INVALID_DEVICE;
	if (!visible[device].vmm || (prop->handles & POSIX && !visible[device].posix))
		return NOT_SUPPORTED;
	if (prop->rdma && visible[device].rdma != 1)
		return visible[device].rdma ? NOT_PERMITTED : NOT_SUPPORTED;
	if (prop->handles & FABRIC && visible[device].fabric != 1)
		return visible[device].fabric ? NOT_PERMITTED : NOT_SUPPORTED;
	return SUCCESS;
}

API int cuMemGetAllocationGranularity(size_t *granularity, const Prop *prop, int option)
{
	ENTER;
	int status = permitted(prop);
	if (!status)
		*granularity = GRANULE;
	return status;
}

API int cuMemCreate(Address *handle, size_t size, const Prop *prop, uint64_t flags)
{
	ENTER;
	if (flags || !size || size % GRANULE)
		return INVALID_VALUE;
	int status = permitted(prop);
	if (status)
		return status;
	int fd = node_take(visible + prop->location.id, size);
	if (fd < 0)
		return OUT_OF_MEMORY;
	status = fill(fd, size);
	if (status) {
		close(fd);
		return status;
	}
	pthread_mutex_lock(&lock);
	*handle = add_handle((Handle){.fd = fd, .device = prop->location.id, .size = size, .prop = *prop});
	pthread_mutex_unlock(&lock);
	return SUCCESS;
}

static int release(Address number)
{
	Handle *found = handle_of(number);
	if (!found)
		return INVALID_VALUE;
	close(found->fd);
	*found = handles[--n_handles];
	count_imports();
	return SUCCESS;
}

API int cuMemRelease(Address number) { ENTER; LOCKED(release(number)); }

static int export(int *out, Address number)
{
	Handle *found = handle_of(number);
	if (!found || !(found->prop.handles & POSIX))
		return INVALID_VALUE;
	*out = dup(found->fd);
	return *out < 0 ? OPERATING_SYSTEM : SUCCESS;
}

API int cuMemExportToShareableHandle(void *out, Address number, int kind, uint64_t flags)
{
	ENTER;
	if (kind == FABRIC)
		return NOT_SUPPORTED;
	if (kind != POSIX || flags)
		return INVALID_VALUE;
	LOCKED(export(out, number));
}

API int cuMemImportFromShareableHandle(Address *handle, void *from, int kind)
{
	ENTER;
	Uuid uuid;
	uint64_t size;
	int fd = kind == POSIX ? fcntl((int)(intptr_t)from, F_DUPFD_CLOEXEC, 3) : -1;
	if (fd < 0)
		return INVALID_VALUE;
	int device = node_is_memory(fd, &uuid, &size) ? node_find(visible, visibles, &uuid) : -1;
	if (device < 0) {
		close(fd);
		return INVALID_VALUE;
	}
	Prop prop = {.type = 1, .handles = POSIX, .location = {1, device}};
	pthread_mutex_lock(&lock);
	*handle = add_handle(
		(Handle){.fd = fd, .device = device, .size = size, .prop = prop, .is_import = 1});
	count_imports();
	pthread_mutex_unlock(&lock);
	return SUCCESS;
}

API int cuMemGetAllocationPropertiesFromHandle(Prop *prop, Address number)
{
	ENTER;
	pthread_mutex_lock(&lock);
	Handle *found = handle_of(number);
	if (found)
		*prop = found->prop;
	pthread_mutex_unlock(&lock);
	return found ? SUCCESS : INVALID_VALUE;
}

static void *reserve(Address at, size_t size)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
	char kind[16];
	fault("cuMemAddressReserve", getpid(), kind);
	int is_deaf = !strcmp(kind, "nohint");
	if (at && !is_deaf) {
		void *found = mmap((void *)at, size, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
		if (found == (void *)at)
			return found;
		if (found != MAP_FAILED)
			munmap(found, size);
	}
	/* A hint only; and reservations begin at whole granules. */
	char *wide = mmap(NULL, size + GRANULE, PROT_NONE, flags, -1, 0);
	if (wide == MAP_FAILED)
		return NULL;
	char *start = (char *)(((Address)wide + GRANULE - 1) / GRANULE * GRANULE);
	/* What is left over keeps the kernel from giving these addresses again. */
	if (start > wide && !is_deaf)
		munmap(wide, start - wide);
	if (!is_deaf)
		munmap(start + size, GRANULE - (start - wide));
	return start;
}

API int cuMemAddressReserve(Address *out, size_t size, size_t alignment, Address at, uint64_t flags)
{
	ENTER;
	if (flags || !size || size % 4096 || at % 4096)
		return INVALID_VALUE;
	void *found = reserve(at, size);
	if (!found)
		return OUT_OF_MEMORY;
	pthread_mutex_lock(&lock);
	if (n_reserved == MOST)
		abort();
	reserved[n_reserved++] = (Range){(Address)found, size};
	pthread_mutex_unlock(&lock);
	*out = (Address)found;
	return SUCCESS;
}

static int unreserve(Address at, size_t size)
{
	for (int i = 0; i < n_mappings; i++)
		if (mappings[i].at >= at && mappings[i].at < at + size)
			return INVALID_VALUE;
	for (int i = 0; i < n_reserved; i++)
		if (reserved[i].at == at && reserved[i].size == size) {
			munmap((void *)at, size);
			reserved[i] = reserved[--n_reserved];
			return SUCCESS;
		}
	return INVALID_VALUE;
}

API int cuMemAddressFree(Address at, size_t size) { ENTER; LOCKED(unreserve(at, size)); }

static int map(Address at, size_t size, size_t offset, Address number)
{
	Handle *from = handle_of(number);
	int inside = 0;
	if (!from || !size || size % GRANULE || at % GRANULE || offset % GRANULE || offset + size > from->size)
		return INVALID_VALUE;
	for (int i = 0; i < n_reserved; i++)
		inside |= reserved[i].at <= at && at + size <= reserved[i].at + reserved[i].size;
	for (int i = 0; i < n_mappings; i++)
		inside &= at + size <= mappings[i].at || mappings[i].at + mappings[i].size <= at;
	if (!inside)
		return INVALID_VALUE;
	/* Elsewhere: only the device reaches memory at the address itself. */
	void *alias = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, from->fd, offset);
	if (alias == MAP_FAILED)
		return OUT_OF_MEMORY;
	if (n_mappings == MOST)
		abort();
	mappings[n_mappings++] = (Mapping){at, size, alias, 0, from->is_import};
	count_imports();
	return SUCCESS;
}

API int cuMemMap(Address at, size_t size, size_t offset, Address number, uint64_t flags)
{
	ENTER;
	if (flags)
		return INVALID_VALUE;
	LOCKED(map(at, size, offset, number));
}

/* Whether mappings are exactly this range together; `each` is done with them then. */
static int within(Address at, size_t size, int flags, int unmap)
{
	size_t sum = 0;
	for (int i = 0; i < n_mappings; i++) {
		Mapping *one = mappings + i;
		if (one->at < at + size && at < one->at + one->size) {
			if (one->at < at || one->at + one->size > at + size)
				return INVALID_VALUE;
			sum += one->size;
		}
	}
	if (!size || sum != size)
		return INVALID_VALUE;
	for (int i = 0; i < n_mappings; i++) {
		Mapping *one = mappings + i;
		if (one->at < at || one->at >= at + size)
			continue;
		one->flags = flags;
		if (unmap) {
			munmap(one->alias, one->size);
			mappings[i--] = mappings[--n_mappings];
		}
	}
	count_imports();
	return SUCCESS;
}

API int cuMemUnmap(Address at, size_t size) { ENTER; LOCKED(within(at, size, 0, 1)); }

API int cuMemSetAccess(Address at, size_t size, const Access *access, size_t count)
{
	ENTER;
	if (count != 1 || access->location.type != 1 ||
			(access->flags != 0 && access->flags != READ && access->flags != WRITE))
		return INVALID_VALUE;
	if (access->location.id < 0 || access->location.id >= visibles)
		return INVALID_DEVICE;
	LOCKED(within(at, size, access->flags, 0));
}

/* Memory with mapping, for programs that are none of ours: not exported, and not cleared. */
API int cuMemAlloc_v2(Address *out, size_t size)
{
	ENTER;
	CONTEXT;
	size = (size + GRANULE - 1) / GRANULE * GRANULE;
	int fd = size ? node_take(visible + device, size) : -1;
	if (fd < 0)
		return size ? OUT_OF_MEMORY : INVALID_VALUE;
	Prop prop = {.type = 1, .location = {1, device}};
	void *at = reserve(0, size);
	pthread_mutex_lock(&lock);
	reserved[n_reserved++] = (Range){(Address)at, size};
	Address number = add_handle((Handle){.fd = fd, .device = device, .size = size, .prop = prop});
	int status = map((Address)at, size, 0, number);
	if (!status)
		mappings[n_mappings - 1].flags = WRITE;
	release(number);
	pthread_mutex_unlock(&lock);
	*out = (Address)at;
	return status;
}

API int cuMemFree_v2(Address at)
{
	ENTER;
	CONTEXT;
	pthread_mutex_lock(&lock);
	int status = INVALID_VALUE;
	for (int i = 0; i < n_reserved && status; i++)
		if (reserved[i].at == at) {
			size_t size = reserved[i].size;
			status = within(at, size, 0, 1);
			if (!status)
				status = unreserve(at, size);
		}
	pthread_mutex_unlock(&lock);
	return status;
}

/* Copy or fill a range of the device, which may cross mappings. */
static int access_device(Address at, size_t size, int flags, void *host, int value)
{
	while (size) {
		Mapping *one = NULL;
		for (int i = 0; i < n_mappings && !one; i++)
			if (mappings[i].at <= at && at < mappings[i].at + mappings[i].size)
				one = mappings + i;
		if (!one || (one->flags & flags) != flags)
			return ILLEGAL_ADDRESS;
		size_t run = one->at + one->size - at;
		char *bytes = (char *)one->alias + (at - one->at);
		run = run < size ? run : size;
		if (!host)
			memset(bytes, value, run);
		else if (flags == WRITE)
			memcpy(bytes, host, run);
		else
			memcpy(host, bytes, run);
		host = host ? (char *)host + run : NULL;
		at += run;
		size -= run;
	}
	return SUCCESS;
}

/* What the device finds broken is so for all that comes after, in every thread. */
static int at_work(int device, int status)
{
	if (status == ILLEGAL_ADDRESS)
		broken[device] = status;
	return status;
}

static int drain(Stream *stream)
{
	int status = SUCCESS;
	while (stream->first) {
		Op *op = stream->first;
		if (!status)
			status = access_device(op->at, op->size, op->to_device ? WRITE : READ, op->host, 0);
		stream->first = op->next;
		free(op);
	}
	stream->last = &stream->first;
	return at_work(stream->device, status);
}

static Stream *stream_of(void *handle)
{
	Stream *found = streams;
	while (found && found != handle)
		found = found->next;
	return found;
}

static int later(void *handle, Op op)
{
	Stream *stream = stream_of(handle);
	if (!stream)
		return INVALID_HANDLE;
	*stream->last = malloc(sizeof op);
	**stream->last = op;
	stream->last = &(*stream->last)->next;
	return SUCCESS;
}

API int cuMemcpyHtoD_v2(Address at, const void *host, size_t size)
{
	ENTER;
	CONTEXT;
	LOCKED(at_work(device, access_device(at, size, WRITE, (void *)host, 0)));
}

API int cuMemcpyDtoH_v2(void *host, Address at, size_t size)
{
	ENTER;
	CONTEXT;
	LOCKED(at_work(device, access_device(at, size, READ, host, 0)));
}

API int cuMemsetD8_v2(Address at, unsigned char value, size_t size)
{
	ENTER;
	CONTEXT;
	LOCKED(at_work(device, access_device(at, size, WRITE, NULL, value)));
}

API int cuMemcpyHtoDAsync_v2(Address at, const void *host, size_t size, void *stream)
{
	ENTER;
	CONTEXT;
	LOCKED(later(stream, (Op){at, (void *)host, size, 1, NULL}));
}

API int cuMemcpyDtoHAsync_v2(void *host, Address at, size_t size, void *stream)
{
	ENTER;
	CONTEXT;
	LOCKED(later(stream, (Op){at, host, size, 0, NULL}));
}

/* In one address space with the host: what is mapped is the device's. */
static int copy_later(Address to, Address from, size_t size, void *stream)
{
	int to_device = 0;
	for (int i = 0; i < n_mappings; i++)
		to_device |= mappings[i].at <= to && to < mappings[i].at + mappings[i].size;
	return later(stream, (Op){to_device ? to : from, (void *)(to_device ? from : to), size, to_device, NULL});
}

API int cuMemcpyAsync(Address to, Address from, size_t size, void *stream)
{
	ENTER;
	CONTEXT;
	LOCKED(copy_later(to, from, size, stream));
}

API int cuMemcpyBatchAsync_v2(Address *to, Address *from, size_t *size, size_t count, void *attributes,
		size_t *which, size_t kinds, void *stream)
{
	ENTER;
	CONTEXT;
	int status = SUCCESS;
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < count && !status; i++)
		status = copy_later(to[i], from[i], size[i], stream);
	pthread_mutex_unlock(&lock);
	return status;
}

/* KvikIO looks for these, and calls none of them for what is done with it here. */
#define UNUSED(name) API int name(void) { return NOT_SUPPORTED; }
UNUSED(cuPointerGetAttribute)
UNUSED(cuPointerGetAttributes)
UNUSED(cuCtxCreate_v4)
UNUSED(cuCtxDestroy_v2)
UNUSED(cuMemGetAddressRange_v2)
UNUSED(cuEventCreate)
UNUSED(cuEventSynchronize)
UNUSED(cuEventDestroy_v2)
UNUSED(cuEventRecord)
UNUSED(cuEventQuery)
UNUSED(cuLaunchHostFunc)

static int drain_all(int device)
{
	int status = SUCCESS;
	for (Stream *each = streams; each && !status; each = each->next)
		status = each->device == device ? drain(each) : SUCCESS;
	return status;
}

API int cuCtxSynchronize(void) { ENTER; CONTEXT; LOCKED(drain_all(device)); }

API int cuStreamCreate(void **out, unsigned flags)
{
	ENTER;
	CONTEXT;
	if (flags > 1)
		return INVALID_VALUE;
	Stream *made = calloc(1, sizeof *made);
	made->last = &made->first;
	made->device = device;
	pthread_mutex_lock(&lock);
	made->next = streams;
	streams = made;
	n_streams++;
	pthread_mutex_unlock(&lock);
	*out = made;
	return SUCCESS;
}

static int synchronize(void *handle)
{
	Stream *found = stream_of(handle);
	return found ? drain(found) : INVALID_HANDLE;
}

API int cuStreamSynchronize(void *handle) { ENTER; CONTEXT; LOCKED(synchronize(handle)); }

static int destroy(void *handle)
{
	Stream **at = &streams;
	while (*at && *at != handle)
		at = &(*at)->next;
	if (!*at)
		return INVALID_HANDLE;
	Stream *gone = *at;
	int status = drain(gone);
	*at = gone->next;
	n_streams--;
	free(gone);
	return status;
}

API int cuStreamDestroy_v2(void *handle) { ENTER; CONTEXT; LOCKED(destroy(handle)); }

API int cuMemHostAlloc(void **out, size_t size, unsigned flags)
{
	ENTER;
	CONTEXT;
	if (!size || flags > 7)
		return INVALID_VALUE;
	*out = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (*out == MAP_FAILED)
		return OUT_OF_MEMORY;
	memset(*out, GARBAGE, size);
	pthread_mutex_lock(&lock);
	pinned[n_pinned++] = (Range){(Address)*out, size};
	pthread_mutex_unlock(&lock);
	return SUCCESS;
}

static int unpin(Address at, int unmap)
{
	for (int i = 0; i < n_pinned; i++)
		if (pinned[i].at == at) {
			if (unmap)
				munmap((void *)at, pinned[i].size);
			pinned[i] = pinned[--n_pinned];
			return SUCCESS;
		}
	return INVALID_VALUE;
}

API int cuMemFreeHost(void *at) { ENTER; CONTEXT; LOCKED(unpin((Address)at, 1)); }

API int cuMemHostRegister_v2(void *at, size_t size, unsigned flags)
{
	ENTER;
	CONTEXT;
	if (!size || !at)
		return INVALID_VALUE;
	pthread_mutex_lock(&lock);
	pinned[n_pinned++] = (Range){(Address)at, size};
	pthread_mutex_unlock(&lock);
	return SUCCESS;
}

API int cuMemHostUnregister(void *at) { ENTER; CONTEXT; LOCKED(unpin((Address)at, 0)); }

Call memory_calls[] = {
#define CALL(name) {#name, name, NULL, 0, 0}
#define CALL_V(name, version) {#name, name##version, NULL, 0, 0}
	CALL(cuDevicePrimaryCtxRetain), CALL_V(cuDevicePrimaryCtxRelease, _v2),
	CALL_V(cuDevicePrimaryCtxSetFlags, _v2), CALL(cuDevicePrimaryCtxGetState),
	CALL_V(cuCtxPushCurrent, _v2), CALL_V(cuCtxPopCurrent, _v2), CALL(cuCtxGetCurrent),
	CALL(cuCtxSetCurrent), CALL(cuCtxGetDevice), CALL(cuCtxSynchronize), CALL_V(cuMemGetInfo, _v2),
	CALL(cuMemGetAllocationGranularity), CALL(cuMemCreate), CALL(cuMemRelease),
	CALL(cuMemExportToShareableHandle), CALL(cuMemImportFromShareableHandle),
	CALL(cuMemGetAllocationPropertiesFromHandle), CALL(cuMemAddressReserve), CALL(cuMemAddressFree),
	CALL(cuMemMap), CALL(cuMemUnmap), CALL(cuMemSetAccess), CALL_V(cuMemAlloc, _v2),
	CALL_V(cuMemFree, _v2), CALL_V(cuMemcpyHtoD, _v2), CALL_V(cuMemcpyDtoH, _v2),
	CALL(cuMemcpyAsync), CALL_V(cuMemcpyBatchAsync, _v2), CALL_V(cuMemcpyHtoDAsync, _v2), CALL_V(cuMemcpyDtoHAsync, _v2), CALL_V(cuMemsetD8, _v2),
	CALL(cuStreamCreate), CALL(cuStreamSynchronize), CALL_V(cuStreamDestroy, _v2),
	CALL(cuMemHostAlloc), CALL(cuMemFreeHost), CALL_V(cuMemHostRegister, _v2),
	CALL(cuMemHostUnregister), {NULL, NULL, NULL, 0, 0},
};

/* For tests: forget all that this process has, as if it had ended. */
void memory_reset(void)
{
	pthread_mutex_lock(&lock);
	while (n_handles)
		close(handles[--n_handles].fd);
	while (n_mappings) {
		n_mappings--;
		munmap(mappings[n_mappings].alias, mappings[n_mappings].size);
	}
	while (n_reserved) {
		n_reserved--;
		munmap((void *)reserved[n_reserved].at, reserved[n_reserved].size);
	}
	while (streams) {
		streams->first = NULL;
		destroy(streams);
	}
	for (int i = 0; i < GPUS; i++)
		if (retained[i] && visible[i].context)
			close(context_fd[i]);
	memset(retained, 0, sizeof retained);
	memset(broken, 0, sizeof broken);
	memset(flags_of, 0, sizeof flags_of);
	n_pinned = 0;
	generation++;
	pthread_mutex_unlock(&lock);
}

/* For tests: what this process has, by a letter: handles, mappings, reservations, pinned buffers,
   streams, contexts of the thread; numbers or addresses in the order in which they lie. */
static int compare(const void *one, const void *other)
{
	Address a = *(const Address *)one, b = *(const Address *)other;
	return a < b ? -1 : a > b;
}

API int fakeHas(char what, Address *out, int most)
{
	int count = 0;
	pthread_mutex_lock(&lock);
	current();
	int total = what == 'h' ? n_handles : what == 'm' ? n_mappings : what == 'r' ? n_reserved :
		what == 'p' ? n_pinned : what == 's' ? n_streams : what == 'c' ? stack.depth : 0;
	for (; count < total && count < most; count++)
		out[count] = what == 'h' ? handles[count].number : what == 'm' ? mappings[count].at :
			what == 'r' ? reserved[count].at : what == 'p' ? pinned[count].at :
			what == 'c' ? (Address)stack.context[count] : 0;
	pthread_mutex_unlock(&lock);
	qsort(out, count, sizeof *out, compare);
	return count;
}

/* For tests: how often the primary context of a device is retained here. */
API int fakeRetained(int device) { return retained[device]; }
