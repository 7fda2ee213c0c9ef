/* A node with fake GPUs, whose folder is FAKE_CUDA: what libcuda.c, memory.c and nvml.c share.

   `devices` in the folder has a line for each device, in the order of their PCI addresses:
     UUID [KEY=VALUE ...]   with the keys
     bytes    the memory that it has (256 MiB)        context  what a context takes of it (0)
     name     with _ for spaces (Fake_GPU)            of       of a MIG device, the uuid of its GPU
     vmm, posix, rdma   its attributes (1); 2: has it, and refuses such memory (rdma, fabric)
     fabric   its attribute (0); 2 is a node without IMEX channel */
#ifndef NODE_H
#define NODE_H
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define GPUS 16

typedef struct { unsigned char bytes[16]; } Uuid;

typedef struct {
	Uuid uuid, of;
	int is_mig, vmm, posix, rdma, fabric;
	uint64_t bytes, context;
	char name[64];
} Device;

typedef struct { int pid; uint64_t bytes; } Holder;

int node_open(const char *name, int flags);
int node_devices(Device *out);
int node_find(const Device *list, int count, const Uuid *uuid);
int node_parse(const char *text, Uuid *uuid);

/* Memory is counted on the whole node. It is that of a device while any process has it open or
   mapped, and free as soon as none does, however they ended. */
int node_take(const Device *device, uint64_t bytes);
uint64_t node_used(const Device *device);
int node_holders(const Device *device, Holder *out, int most);
int node_is_memory(int fd, Uuid *device, uint64_t *bytes);
#endif
