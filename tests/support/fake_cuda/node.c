/* The devices of a node and their memory; see node.h. */
#define _GNU_SOURCE
#include "node.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define MEMORY "memory"

int node_open(const char *name, int flags)
{
	char path[4096], *folder = getenv("FAKE_CUDA");
	if (!folder) {
		errno = ENOENT;
		return -1;
	}
	snprintf(path, sizeof path, "%s/%s", folder, name);
	return open(path, flags | O_CLOEXEC, 0666);
}

/* Read a uuid with or without its prefix and hyphens; the number of bytes that it has. */
int node_parse(const char *text, Uuid *uuid)
{
	unsigned byte;
	int at = 0;
	const char *c = text + (!strncmp(text, "GPU-", 4) || !strncmp(text, "MIG-", 4) ? 4 : 0);
	for (; at < 16 && sscanf(c, "%2x", &byte) == 1; c += 2 + (c[2] == '-'))
		uuid->bytes[at++] = byte;
	return at;
}

static void put(Device *to, const char *key, char *value)
{
	if (!strcmp(key, "bytes")) to->bytes = strtoull(value, 0, 0);
	if (!strcmp(key, "context")) to->context = strtoull(value, 0, 0);
	if (!strcmp(key, "vmm")) to->vmm = atoi(value);
	if (!strcmp(key, "posix")) to->posix = atoi(value);
	if (!strcmp(key, "rdma")) to->rdma = atoi(value);
	if (!strcmp(key, "fabric")) to->fabric = atoi(value);
	if (!strcmp(key, "of")) node_parse(value, &to->of);
	if (!strcmp(key, "name")) {
		for (char *c = value; *c; c++)
			*c = *c == '_' ? ' ' : *c;
		snprintf(to->name, sizeof to->name, "%s", value);
	}
}

int node_devices(Device *out)
{
	char line[512], *rest;
	int count = 0, fd = node_open("devices", O_RDONLY);
	FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
	while (file && count < GPUS && fgets(line, sizeof line, file)) {
		char *word = strtok_r(line, " \n", &rest);
		Device *to = out + count;
		*to = (Device){.vmm = 1, .posix = 1, .rdma = 1, .bytes = 256 << 20};
		if (!word || node_parse(word, &to->uuid) != 16)
			continue;
		to->is_mig = !strncmp(word, "MIG-", 4);
		strcpy(to->name, to->is_mig ? "Fake GPU MIG 1g.10gb" : "Fake GPU");
		while ((word = strtok_r(NULL, " \n", &rest))) {
			char *value = strchr(word, '=');
			if (value) {
				*value = 0;
				put(to, word, value + 1);
			}
		}
		count++;
	}
	if (file)
		fclose(file);
	return count;
}

int node_find(const Device *list, int count, const Uuid *uuid)
{
	for (int i = 0; i < count; i++)
		if (!memcmp(&list[i].uuid, uuid, sizeof *uuid))
			return i;
	return -1;
}

static void hex(const Uuid *uuid, char *out)
{
	for (int i = 0; i < 16; i++)
		sprintf(out + 2 * i, "%02x", uuid->bytes[i]);
}

/* Open the folder of the memory and keep others from changing what is taken. */
static int locked(void)
{
	int fd = node_open(MEMORY, O_RDONLY | O_DIRECTORY);
	if (fd < 0) {
		int above = node_open(".", O_RDONLY | O_DIRECTORY);
		if (above < 0 || (mkdirat(above, MEMORY, 0777) && errno != EEXIST))
			abort();
		close(above);
		fd = node_open(MEMORY, O_RDONLY | O_DIRECTORY);
	}
	if (fd < 0 || flock(fd, LOCK_EX))
		abort();
	return fd;
}

/* Call `each` for what is taken of a device. The lock of a memory file is that of its one open file
   description, which descriptors, exports in flight and mappings of any process keep. */
static uint64_t walk(int folder, const Device *device, void (*each)(int, uint64_t, void *), void *with)
{
	char own[33], its[33];
	uint64_t sum = 0;
	int again = openat(folder, ".", O_RDONLY | O_CLOEXEC | O_DIRECTORY);
	DIR *listed = fdopendir(again);
	struct dirent *entry;
	if (!listed)
		abort();
	hex(&device->uuid, own);
	while ((entry = readdir(listed))) {
		unsigned long long bytes;
		int pid;
		if (sscanf(entry->d_name, "%32[0-9a-f]-%llu-%d-", its, &bytes, &pid) != 3)
			continue;
		int fd = openat(folder, entry->d_name, O_RDONLY | O_CLOEXEC);
		int is_free = fd >= 0 && !flock(fd, LOCK_EX | LOCK_NB);
		if (is_free)
			unlinkat(folder, entry->d_name, 0);
		if (fd >= 0)
			close(fd);
		if (is_free || strcmp(own, its))
			continue;
		sum += bytes;
		if (each)
			each(pid, bytes, with);
	}
	closedir(listed);
	return sum;
}

/* Take memory of a device; its descriptor, or -1 when there is not so much. */
int node_take(const Device *device, uint64_t bytes)
{
	char name[128], uuid[33];
	static unsigned number;
	int folder = locked(), fd = -1;
	hex(&device->uuid, uuid);
	if (walk(folder, device, NULL, NULL) + bytes <= device->bytes) {
		do {
			snprintf(name, sizeof name, "%s-%llu-%d-%u", uuid, (unsigned long long)bytes, getpid(),
				number++);
			fd = openat(folder, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
		} while (fd < 0 && errno == EEXIST);
		if (fd < 0 || flock(fd, LOCK_EX) || ftruncate(fd, bytes))
			abort();
	}
	close(folder);
	return fd;
}

uint64_t node_used(const Device *device)
{
	int folder = locked();
	uint64_t sum = walk(folder, device, NULL, NULL);
	close(folder);
	return sum;
}

struct found { Holder *out; int count, most; };

static void add(int pid, uint64_t bytes, void *with)
{
	struct found *to = with;
	int at = 0;
	if (kill(pid, 0) && errno == ESRCH)
		return;  /* its importers hold it, and are on no list */
	while (at < to->count && to->out[at].pid != pid)
		at++;
	if (at == to->most)
		return;
	if (at == to->count)
		to->out[to->count++] = (Holder){.pid = pid};
	to->out[at].bytes += bytes;
}

int node_holders(const Device *device, Holder *out, int most)
{
	struct found to = {out, 0, most};
	int folder = locked();
	walk(folder, device, add, &to);
	close(folder);
	return to.count;
}

/* Whether a descriptor is of memory, and of which device. */
int node_is_memory(int fd, Uuid *device, uint64_t *bytes)
{
	char path[64], link[4096] = "", uuid[33];
	unsigned long long size;
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	if (readlink(path, link, sizeof link - 1) < 0)
		return 0;
	char *name = strrchr(link, '/');
	if (!name || sscanf(name, "/%32[0-9a-f]-%llu-", uuid, &size) != 2 || node_parse(uuid, device) != 16)
		return 0;
	*bytes = size;
	return 1;
}
