/* What the two halves of the fake libcuda.so.1 know of each other. */
#ifndef FAKE_H
#define FAKE_H
#include "node.h"
#include <string.h>

enum {
	SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100,
	INVALID_DEVICE = 101, INVALID_CONTEXT = 201, OPERATING_SYSTEM = 304, INVALID_HANDLE = 400,
	ILLEGAL_STATE = 401, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
	LAUNCH_FAILED = 719, NOT_PERMITTED = 800, NOT_SUPPORTED = 801,
};

/* Count a call and do what `faults` says of it; not 0 is the status to return. The names are those
   without the suffix of their version. */
int entered(const char *name);
#define ENTER do { int refused_ = entered(__func__); if (refused_) return refused_; } while (0)

/* The devices that this process sees, in its order. */
extern Device visible[GPUS];
extern int visibles;

typedef struct { const char *name; void *call, *older; int since; unsigned long count; } Call;
extern Call memory_calls[];

int fault(const char *verb, int pid, char *kind);
int while_locked(void);
void tell_imports(int count);
void on_device(int ordinal);
void memory_reset(void);
#endif
