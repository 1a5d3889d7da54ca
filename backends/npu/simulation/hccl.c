/* Simulated collectives of a group of one rank: each result is a copy of what that rank contributed.
   Declares its own prototypes; no CANN header or code is used. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { NOT_SUPPORTED = 5, ROOT_INFO_BYTES = 4108 };

/* Bytes of an element, by HCCL's number of the data type. */
static const size_t element_bytes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};

static int copy(void *from, void *to, uint64_t count, int type) {
  if (type < 0 || (size_t)type >= sizeof element_bytes / sizeof *element_bytes) return NOT_SUPPORTED;
  memmove(to, from, count * element_bytes[type]);
  return 0;
}

EXPORT int HcclGetRootInfo(char *info) { memset(info, 0, ROOT_INFO_BYTES); return 0; }

EXPORT int HcclCommInitRootInfo(uint32_t ranks, const char *info, uint32_t rank, void **group) {
  if (ranks != 1) return NOT_SUPPORTED;
  *group = malloc(1);
  return 0;
}

EXPORT int HcclCommInitRootInfoConfig(uint32_t n, const char *info, uint32_t r, const void *c, void **group) {
  return HcclCommInitRootInfo(n, info, r, group);
}

EXPORT int HcclCreateSubCommConfig(void **parent, uint32_t n, uint32_t *ranks, uint64_t id, uint32_t r, void *c,
                                   void **group) {
  return HcclCommInitRootInfo(n, NULL, r, group);
}

EXPORT int HcclCommDestroy(void *group) { free(group); return 0; }
EXPORT int HcclGetCommName(void *group, char *name) { strcpy(name, "simulated"); return 0; }
EXPORT int HcclGetCommAsyncError(void *group, int *error) { *error = 0; return 0; }
EXPORT uint32_t HcclGetCommConfigCapability(void) { return 0; }
EXPORT int HcclSetConfig(int key, int value) { return 0; }
EXPORT const char *HcclGetErrorString(int code) { return "simulated HCCL error"; }
EXPORT int HcclBarrier(void *group, void *stream) { return 0; }
EXPORT int HcclBroadcast(void *data, uint64_t n, int type, uint32_t root, void *g, void *s) { return 0; }

EXPORT int HcclAllReduce(void *from, void *to, uint64_t n, int type, int op, void *group, void *stream) {
  return copy(from, to, n, type);
}

EXPORT int HcclReduceScatter(void *from, void *to, uint64_t n, int type, int op, void *group, void *stream) {
  return copy(from, to, n, type);
}

EXPORT int HcclAllGather(void *from, void *to, uint64_t n, int type, void *group, void *stream) {
  return copy(from, to, n, type);
}
