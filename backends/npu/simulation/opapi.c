/* A simulated libopapi: the descriptions that torch-npu makes of tensors, and the one kernel that it calls without
   torch's dispatcher. Compiled with RECORD, it also has every other kernel of torch-npu, by name only: a call is
   written to SIMULATED_NPU_RECORD as a line of JSON and computes NOTHING.
   Declares its own prototypes; no CANN header or code is used. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { WRONG_ARGUMENT = 561103, MOST_DIMENSIONS = 16, TYPES = 28 };

/* By ACL's number of the data type. */
static const char *type_names[TYPES] = {
    "float32", "float16", "int8",    "int32", "uint8", NULL, "int16", "uint16", "uint32", "int64", "uint64", "float64",
    "bool",    NULL,      NULL,      NULL,    "complex64", "complex128", NULL,  NULL,     NULL,    NULL,     NULL,
    NULL,      NULL,      NULL,      NULL,    "bfloat16"};
static const uint8_t type_bytes[TYPES] = {4, 2, 1, 4, 1, 0, 2, 2, 4, 8, 8, 8, 1, 0, 0, 0, 8, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2};

typedef struct {
  int type, dimensions;
  int64_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS], offset;
  char *data;
} tensor;

typedef struct { uint64_t count; int64_t values[]; } integers;

/* ---- what the next kernel of this thread is called with, as text ---- */

typedef struct { char *text; size_t length; } list;

static __thread list tensors, arrays;

#ifdef RECORD
static void add(list *items, const char *format, ...) {
  char text[1024];
  va_list values;
  va_start(values, format);
  size_t length = vsnprintf(text, sizeof text, format, values);
  va_end(values);
  if (length >= sizeof text) length = sizeof text - 1;
  items->text = realloc(items->text, items->length + length + 1);
  memcpy(items->text + items->length, text, length + 1);
  items->length += length;
}

static void add_integers(list *items, const int64_t *values, uint64_t count) {
  add(items, "[");
  for (uint64_t i = 0; i < count; i++) add(items, i ? ", %ld" : "%ld", (long)values[i]);
  add(items, "]");
}

static void add_tensor(const tensor *t) {
  const char *name = t->type >= 0 && t->type < TYPES ? type_names[t->type] : NULL;
  add(&tensors, "%s{\"dtype\": \"%s", tensors.length ? ", " : "", name ? name : "");
  if (name == NULL) add(&tensors, "number %d", t->type);
  add(&tensors, "\", \"shape\": ");
  add_integers(&tensors, t->shape, t->dimensions);
  add(&tensors, "}");
}

static void add_array(const int64_t *values, uint64_t count) {
  if (arrays.length) add(&arrays, ", ");
  add_integers(&arrays, values, count);
}

static void clear(list *items) {
  free(items->text);
  *items = (list){NULL, 0};
}

/* Write one line; lines of several processes do not mix, for each is written at once. */
static int record(const char *kernel) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  const char *path = getenv("SIMULATED_NPU_RECORD");
  pthread_mutex_lock(&lock);
  FILE *file = path == NULL ? NULL : fopen(path, "a");
  if (file != NULL) {
    char *line;
    int length = asprintf(&line, "{\"kernel\": \"%s\", \"tensors\": [%s], \"integers\": [%s]}\n", kernel,
                          tensors.length ? tensors.text : "", arrays.length ? arrays.text : "");
    setvbuf(file, NULL, _IOFBF, length + 1);
    fwrite(line, 1, length, file);
    fclose(file);
    free(line);
  }
  pthread_mutex_unlock(&lock);
  clear(&tensors);
  clear(&arrays);
  return 0;
}

#define KERNEL(name)                                                         \
  EXPORT int name##GetWorkspaceSize(void) { return record(#name); }          \
  EXPORT int name(void *work, uint64_t size, void *plan, void *stream) { return 0; }
#include "kernels.inc"
#else
static void add_tensor(const tensor *t) {}
static void add_array(const int64_t *values, uint64_t count) {}
static int record(const char *kernel) { return 0; }
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
EXPORT void *aclCreateTensorList(void **values, uint64_t n) { return malloc(1); }
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
