/* A simulated libopapi: the descriptions that torch-npu makes of tensors, and the one kernel that it calls without
   torch's dispatcher. Compiled with RECORD, it also has every other kernel of torch-npu, by name only: a call is
   written to SIMULATED_NPU_RECORD as a line of JSON and computes NOTHING.
   Declares its own prototypes; no CANN header or code is used. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { WRONG_ARGUMENT = 561103, MOST_DIMENSIONS = 16, TYPES = 28 };

/* By ACL's number of the data type. */
static const uint8_t type_bytes[TYPES] = {4, 2, 1, 4, 1, 0, 2, 2, 4, 8, 8, 8, 1, 0, 0, 0, 8, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2};

typedef struct {
  int type, dimensions;
  int64_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS], offset;
  char *data;
} tensor;

typedef struct { uint64_t count; int64_t values[]; } integers;

/* ---- what the next kernel of this thread is called with, as text, in the order in which it is described ---- */

#ifdef RECORD
static const char *type_names[TYPES] = {
    "float32", "float16", "int8",    "int32", "uint8", NULL, "int16", "uint16", "uint32", "int64", "uint64", "float64",
    "bool",    NULL,      NULL,      NULL,    "complex64", "complex128", NULL,  NULL,     NULL,    NULL,     NULL,
    NULL,      NULL,      NULL,      NULL,    "bfloat16"};

typedef struct { char **texts; int count; } list;

static __thread list tensors, arrays;

static void add(list *items, char *text) {
  items->texts = realloc(items->texts, (items->count + 1) * sizeof text);
  items->texts[items->count++] = text;
}

/* Put the texts from the first on behind one another, or the last before the others, and take them off the list. */
static char *joined(list *items, int first, int backwards) {
  char *all = calloc(1, 1);
  for (int i = first; i < items->count; i++) {
    char *longer, *text = items->texts[i];
    const char *comma = i > first ? ", " : "";
    asprintf(&longer, "%s%s%s", backwards ? text : all, comma, backwards ? all : text);
    free(all);
    free(text);
    all = longer;
  }
  items->count = first;
  return all;
}

static char *integers_as_text(const int64_t *values, uint64_t count) {
  list numbers = {NULL, 0};
  char *text;
  for (uint64_t i = 0; i < count && asprintf(&text, "%ld", (long)values[i]) >= 0; i++) add(&numbers, text);
  char *all = joined(&numbers, 0, 0);
  asprintf(&text, "[%s]", all);
  free(all);
  free(numbers.texts);
  return text;
}

static void add_tensor(const tensor *t) {
  const char *name = t->type >= 0 && t->type < TYPES && type_names[t->type] ? type_names[t->type] : "unknown";
  char *text, *shape = integers_as_text(t->shape, t->dimensions);
  asprintf(&text, "{\"dtype\": \"%s\", \"shape\": %s}", name, shape);
  free(shape);
  add(&tensors, text);
}

static void add_array(const int64_t *values, uint64_t count) { add(&arrays, integers_as_text(values, count)); }

/* Make one item of the last ones: a list of tensors is described after its members. */
static void add_tensor_list(uint64_t count) {
  char *text, *members = joined(&tensors, tensors.count - (int)count, 0);
  asprintf(&text, "[%s]", members);
  free(members);
  add(&tensors, text);
}

/* Write one line, in one piece, so that lines of several processes do not mix. torch-npu describes the last argument
   first. */
static int record(const char *kernel) {
  char *described = joined(&tensors, 0, 1), *integers = joined(&arrays, 0, 1), *line;
  const char *path = getenv("SIMULATED_NPU_RECORD");
  int length = asprintf(&line, "{\"kernel\": \"%s\", \"tensors\": [%s], \"integers\": [%s]}\n", kernel, described,
                        integers);
  int file = path == NULL ? -1 : open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  int written = file >= 0 && write(file, line, length) == length;
  if (file >= 0) close(file);
  free(described);
  free(integers);
  free(line);
  return written ? 0 : WRONG_ARGUMENT;
}

#define KERNEL(name)                                                \
  EXPORT int name##GetWorkspaceSize(void) { return record(#name); } \
  EXPORT int name(void *work, uint64_t size, void *plan, void *stream) { return 0; }
#include "kernels.inc"
#else
static void add_tensor(const tensor *t) {}
static void add_array(const int64_t *values, uint64_t count) {}
static void add_tensor_list(uint64_t count) {}
#endif

/* ---- descriptions ---- */

EXPORT void *aclCreateTensor(const int64_t *shape, uint64_t n, int type, const int64_t *strides, int64_t offset,
                             int format, const int64_t *storage, uint64_t storage_n, void *data) {
  tensor *t = calloc(1, sizeof *t);
  t->type = type;
  t->dimensions = n < MOST_DIMENSIONS ? n : MOST_DIMENSIONS;
  t->offset = offset;
  t->data = data;
  for (int i = 0; i < t->dimensions; i++) {
    t->shape[i] = shape[i];
    t->strides[i] = strides[i];
  }
  add_tensor(t);
  return t;
}

EXPORT void *aclCreateIntArray(const int64_t *values, uint64_t n) {
  integers *array = malloc(sizeof *array + n * sizeof *values);
  array->count = n;
  if (n > 0) memcpy(array->values, values, n * sizeof *values);
  add_array(values, n);
  return array;
}

EXPORT void *aclCreateScalar(void *value, int type) { return malloc(1); }
EXPORT void *aclCreateFloatArray(const float *values, uint64_t n) { return malloc(1); }
EXPORT void *aclCreateBoolArray(const char *values, uint64_t n) { return malloc(1); }

EXPORT void *aclCreateTensorList(void **values, uint64_t n) {
  add_tensor_list(n);
  return malloc(1);
}

EXPORT void *aclCreateScalarList(void **values, uint64_t n) { return malloc(1); }
EXPORT int aclDestroyTensor(void *made) { free(made); return 0; }
EXPORT int aclDestroyScalar(void *made) { free(made); return 0; }
EXPORT int aclDestroyIntArray(void *made) { free(made); return 0; }
EXPORT int aclDestroyFloatArray(void *made) { free(made); return 0; }
EXPORT int aclDestroyBoolArray(void *made) { free(made); return 0; }
EXPORT int aclDestroyTensorList(void *made) { free(made); return 0; }
EXPORT int aclDestroyScalarList(void *made) { free(made); return 0; }
EXPORT int aclDestroyAclOpExecutor(void *made) { return 0; }

/* ---- ProcessGroupHCCL fills buffers up to 512 bytes on Atlas A2 and A3: zeros behind a row ---- */

EXPORT int aclnnConstantPadNdGetWorkspaceSize(tensor *from, integers *padding, void *value, tensor *to, uint64_t *work,
                                              void **plan) {
  *work = 0;
  *plan = NULL;
#ifdef RECORD
  return record("aclnnConstantPadNd");
#endif
  size_t bytes = from->type >= 0 && from->type < TYPES ? type_bytes[from->type] : 0;
  int is_row = from->dimensions == 1 || (from->dimensions == 2 && from->shape[0] == 1);
  if (bytes == 0 || !is_row || padding->values[0] != 0) return WRONG_ARGUMENT;
  int last = from->dimensions - 1;
  char *end = to->data + to->offset * bytes, *source = from->data + from->offset * bytes;
  for (int64_t i = 0; i < from->shape[last]; i++, end += bytes)
    memcpy(end, source + i * from->strides[last] * bytes, bytes);
  memset(end, 0, (to->shape[last] - from->shape[last]) * bytes);
  return 0;
}

EXPORT int aclnnConstantPadNd(void *work, uint64_t size, void *plan, void *stream) { return 0; }
