/* Simulated collectives between processes of one host. What a rank contributes is a file in a scratch directory;
   its header says which operation it is for, so that ranks that disagree, or never come, get an error.
   Declares its own prototypes; no CANN header or code is used.

   SIMULATED_NPU_SCRATCH    the directory; the launcher makes and removes it. groups.jsonl lists what groups are asked
   SIMULATED_NPU_TIMEOUT_S  how long a rank waits for the others (60) */

#define _GNU_SOURCE
#include "simulated.h"
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { WRONG_ARGUMENT = 1, NOT_SUPPORTED = 5, SYSTEM_CALL = 8, TIMED_OUT = 9 };
enum { ROOT_INFO_BYTES = 4108, NAME_BYTES = 128, MOST_RANKS = 64, NO_GROUP = -1 };
enum { SUM, PRODUCT, MAXIMUM, MINIMUM };
static const char *reduction_names[] = {"sum", "product", "max", "min"}; /* copies have the first */

/* HCCL's numbers of the data types that can be reduced on Atlas A2, and the names of all for messages. */
enum { INT8, INT16, INT32, FLOAT16, FLOAT32, INT64, UINT64, UINT8, UINT16, UINT32, FLOAT64, BFLOAT16, TYPES };
static const size_t type_bytes[TYPES] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};
static const char *type_names[TYPES] = {"int8",   "int16", "int32",  "float16", "float32", "int64",
                                        "uint64", "uint8", "uint16", "uint32",  "float64", "bfloat16"};

typedef struct {
  char name[NAME_BYTES];
  int size, rank;
  uint64_t collectives, sent[MOST_RANKS], received[MOST_RANKS];
} group;

/* What a rank says of its contribution. Ranks must agree on all but the parts. */
typedef struct {
  char operation[24];
  uint64_t count;
  uint32_t type, reduction, root;
  uint64_t parts[MOST_RANKS + 1]; /* where the elements for each rank begin; the last is where they end */
} header;

/* ---- files ---- */

/* A contribution that was opened: its header and its elements. */
typedef struct { header *header; const char *data; size_t size; } contribution;

static int path_of(char *path, const group *g, const char *kind, uint64_t number, int from, int to) {
  const char *scratch = getenv("SIMULATED_NPU_SCRATCH");
  if (scratch == NULL) return failure(SYSTEM_CALL, "groups of several ranks need the launcher of the simulation");
  snprintf(path, PATH_MAX, "%s/%s.%s.%lu.%d-%d", scratch, g->name, kind, (unsigned long)number, from, to);
  return 0;
}

/* Write a file that appears at once and whole. */
static int publish(const char *path, const header *h, const void *data) {
  char unfinished[PATH_MAX + 8];
  snprintf(unfinished, sizeof unfinished, "%s.part", path);
  size_t bytes = h->parts[MOST_RANKS] * type_bytes[h->type];
  FILE *file = fopen(unfinished, "wb");
  if (file == NULL) return failure(SYSTEM_CALL, "cannot write %s", unfinished);
  int whole = fwrite(h, sizeof *h, 1, file) == 1 && (bytes == 0 || fwrite(data, bytes, 1, file) == 1);
  if (fclose(file) != 0 || !whole || rename(unfinished, path) != 0) {
    unlink(unfinished);
    return failure(SYSTEM_CALL, "cannot write %s", path);
  }
  return 0;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

/* Open a file that another rank publishes, when it is there. */
static int await(const char *path, contribution *found, const group *g, int from, const char *operation) {
  long limit = setting("SIMULATED_NPU_TIMEOUT_S", 60);
  double end = seconds() + limit;
  int file;
  for (useconds_t pause = 20; (file = open(path, O_RDONLY | O_CLOEXEC)) < 0; pause += pause < 1000 ? 20 : 0) {
    if (seconds() > end)
      return failure(TIMED_OUT, "rank %d of %d waited %ld s for %s of rank %d", g->rank, g->size, limit, operation,
                     from);
    usleep(pause);
  }
  struct stat facts;
  fstat(file, &facts);
  void *bytes = mmap(NULL, facts.st_size, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (bytes == MAP_FAILED) return failure(SYSTEM_CALL, "cannot read %s", path);
  *found = (contribution){bytes, (char *)bytes + sizeof(header), facts.st_size};
  return 0;
}

static void release(contribution *c) { munmap(c->header, c->size); }

/* ---- the one step that all collectives are made of ---- */

static int agrees(const group *g, int other, const header *mine, const header *theirs) {
  const header *both[2] = {mine, theirs};
  char texts[2][128];
  if (strcmp(mine->operation, theirs->operation) == 0 && mine->count == theirs->count &&
      mine->type == theirs->type && mine->reduction == theirs->reduction && mine->root == theirs->root)
    return 0;
  for (int i = 0; i < 2; i++)
    snprintf(texts[i], sizeof texts[i], "%s of %lu %s (reduction %s, root %u)", both[i]->operation,
             (unsigned long)both[i]->count, type_names[both[i]->type], reduction_names[both[i]->reduction],
             both[i]->root);
  return failure(WRONG_ARGUMENT, "rank %d calls %s, rank %d calls %s", g->rank, texts[0], other, texts[1]);
}

/* Takes the contribution of one rank; called in the order of ranks. */
typedef int (*visitor)(void *state, const group *g, int rank, const contribution *c);

static int alone(const group *g, const header *mine, const void *data, visitor visit, void *state) {
  size_t bytes = mine->parts[MOST_RANKS] * type_bytes[mine->type];
  char *copy = malloc(bytes + 1); /* the result may lie over it */
  if (bytes > 0) memcpy(copy, data, bytes);
  contribution own = {(header *)mine, copy, 0};
  int status = visit == NULL ? 0 : visit(state, g, 0, &own);
  free(copy);
  return status;
}

static int exchange(group *g, const header *mine, const void *data, visitor visit, void *state) {
  char path[PATH_MAX];
  if (g->size == 1) return alone(g, mine, data, visit, state);
  uint64_t number = g->collectives++;
  int status = path_of(path, g, "all", number, g->rank, 0);
  if (status == 0) status = publish(path, mine, data);
  for (int rank = 0; status == 0 && rank < g->size; rank++) {
    contribution theirs;
    path_of(path, g, "all", number, rank, 0);
    status = await(path, &theirs, g, rank, mine->operation);
    if (status != 0) return status;
    status = agrees(g, rank, mine, theirs.header);
    if (status == 0 && visit != NULL) status = visit(state, g, rank, &theirs);
    release(&theirs);
  }
  /* all have published this one, so all have read the one before */
  if (number > 0 && path_of(path, g, "all", number - 1, g->rank, 0) == 0) unlink(path);
  return status;
}

static int checked(header *h, const char *operation, uint64_t count, int type, int reduction, uint32_t root) {
  if (type < 0 || type >= TYPES) return failure(NOT_SUPPORTED, "%s of data type number %d", operation, type);
  memset(h, 0, sizeof *h);
  strncpy(h->operation, operation, sizeof h->operation - 1);
  h->count = count;
  h->type = type;
  h->reduction = reduction;
  h->root = root;
  return 0;
}

/* Say how many elements go to each rank: the same number, or those of a list. */
static void divide(header *h, const group *g, const uint64_t *counts, uint64_t each) {
  for (int rank = 0; rank < g->size; rank++) h->parts[rank + 1] = h->parts[rank] + (counts ? counts[rank] : each);
  h->parts[MOST_RANKS] = h->parts[g->size];
}

static void whole(header *h, uint64_t count) { h->parts[MOST_RANKS] = count; }

/* ---- reductions ---- */

static float from_bfloat16(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

static uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (value != value) return 0x7FC0;
  return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16; /* to the nearest, ties to even */
}

/* What is not a number stays: which rank has it, and where, makes no difference. */
#define LARGER(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define SMALLER(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define REDUCED(a, b) \
  (op == SUM ? (a) + (b) : op == PRODUCT ? (a) * (b) : op == MAXIMUM ? LARGER(a, b) : SMALLER(a, b))

#define REDUCE_AS(type)                                                     \
  do {                                                                      \
    type *sums = total;                                                     \
    const type *values = more;                                              \
    for (uint64_t i = 0; i < n; i++) sums[i] = REDUCED(sums[i], values[i]); \
  } while (0)

static void reduce_bfloat16(uint16_t *total, const uint16_t *more, uint64_t n, int op) {
  for (uint64_t i = 0; i < n; i++) {
    float sum = from_bfloat16(total[i]), value = from_bfloat16(more[i]);
    total[i] = to_bfloat16(REDUCED(sum, value));
  }
}

static void reduce(void *total, const void *more, uint64_t n, int type, int op) {
  switch (type) {
    case INT8: REDUCE_AS(int8_t); break;
    case INT16: REDUCE_AS(int16_t); break;
    case INT32: REDUCE_AS(int32_t); break;
    case INT64: REDUCE_AS(int64_t); break;
    case FLOAT32: REDUCE_AS(float); break;
    case FLOAT16: REDUCE_AS(_Float16); break;
    case BFLOAT16: reduce_bfloat16(total, more, n, op); break;
  }
}

/* What HCCL's documentation of Atlas A2 lists for reductions. */
static int reducible(const char *operation, int type, int op) {
  int known = type == INT8 || type == INT16 || type == INT32 || type == INT64 || type == FLOAT16 ||
              type == FLOAT32 || type == BFLOAT16;
  if (op < SUM || op > MINIMUM) return failure(NOT_SUPPORTED, "%s with reduction number %d", operation, op);
  if (!known || (op == PRODUCT && (type == INT16 || type == BFLOAT16)))
    return failure(NOT_SUPPORTED, "%s of %s: HCCL has no such reduction on Atlas A2", operation,
                   type >= 0 && type < TYPES ? type_names[type] : "this data type");
  return 0;
}

/* A result under way: the elements of one rank, reduced over the ranks seen. */
typedef struct { char *result; uint64_t first, count; } reduction;

static int add_rank(void *state, const group *g, int rank, const contribution *c) {
  reduction *r = state;
  const char *values = c->data + r->first * type_bytes[c->header->type];
  if (rank == 0)
    memcpy(r->result, values, r->count * type_bytes[c->header->type]);
  else
    reduce(r->result, values, r->count, c->header->type, c->header->reduction);
  return 0;
}

/* Reduce elements [first, first + count) of what all contribute. */
static int reduced(group *g, const header *h, const void *from, void *to, uint64_t first, uint64_t count) {
  reduction state = {to, first, count};
  return exchange(g, h, from, add_rank, &state);
}

EXPORT int HcclAllReduce(void *from, void *to, uint64_t n, int type, int op, group *g, void *stream) {
  header h;
  int status = reducible("all_reduce", type, op);
  if (status == 0) status = checked(&h, "all_reduce", n, type, op, 0);
  if (status != 0) return status;
  whole(&h, n);
  return reduced(g, &h, from, to, 0, n);
}

EXPORT int HcclReduce(void *from, void *to, uint64_t n, int type, int op, uint32_t root, group *g, void *stream) {
  header h;
  int status = reducible("reduce", type, op);
  if (status == 0) status = checked(&h, "reduce", n, type, op, root);
  if (status != 0) return status;
  whole(&h, n);
  return reduced(g, &h, from, to, 0, (int)root == g->rank ? n : 0);
}

EXPORT int HcclReduceScatter(void *from, void *to, uint64_t n, int type, int op, group *g, void *stream) {
  header h;
  int status = reducible("reduce_scatter", type, op);
  if (status == 0) status = checked(&h, "reduce_scatter", n, type, op, 0);
  if (status != 0) return status;
  divide(&h, g, NULL, n);
  return reduced(g, &h, from, to, h.parts[g->rank], n);
}

EXPORT int HcclReduceScatterV(void *from, const uint64_t *counts, const uint64_t *starts, void *to, uint64_t n,
                              int type, int op, group *g, void *stream) {
  header h;
  int status = reducible("reduce_scatter_v", type, op);
  if (status == 0) status = checked(&h, "reduce_scatter_v", 0, type, op, 0);
  if (status != 0) return status;
  divide(&h, g, counts, 0);
  h.count = h.parts[MOST_RANKS];
  if (counts[g->rank] != n)
    return failure(WRONG_ARGUMENT, "reduce_scatter_v: rank %d takes %lu of %lu", g->rank, (unsigned long)n,
                   (unsigned long)counts[g->rank]);
  for (int rank = 0; rank < g->size; rank++)
    if (starts[rank] != h.parts[rank]) return failure(NOT_SUPPORTED, "reduce_scatter_v with gaps");
  return reduced(g, &h, from, to, h.parts[g->rank], n);
}

/* ---- copies ---- */

/* Where the elements of each rank go, and how many they must be. */
typedef struct { char *to; const uint64_t *starts, *counts; uint64_t each; } destination;

static int take_part(void *state, const group *g, int rank, const contribution *c) {
  destination *d = state;
  size_t bytes = type_bytes[c->header->type];
  uint64_t first = c->header->parts[g->rank], given = c->header->parts[g->rank + 1] - first;
  uint64_t wanted = d->counts ? d->counts[rank] : d->each;
  if (given != wanted)
    return failure(WRONG_ARGUMENT, "%s: rank %d takes %lu elements from rank %d, which gives %lu",
                   c->header->operation, g->rank, (unsigned long)wanted, rank, (unsigned long)given);
  memcpy(d->to + (d->starts ? d->starts[rank] : rank * d->each) * bytes, c->data + first * bytes, given * bytes);
  return 0;
}

static int take_whole(void *state, const group *g, int rank, const contribution *c) {
  destination *d = state;
  size_t bytes = type_bytes[c->header->type];
  uint64_t given = c->header->parts[MOST_RANKS], wanted = d->counts ? d->counts[rank] : d->each;
  if (given != wanted)
    return failure(WRONG_ARGUMENT, "%s: rank %d takes %lu elements from rank %d, which gives %lu",
                   c->header->operation, g->rank, (unsigned long)wanted, rank, (unsigned long)given);
  memcpy(d->to + (d->starts ? d->starts[rank] : rank * d->each) * bytes, c->data, given * bytes);
  return 0;
}

static int take_root(void *state, const group *g, int rank, const contribution *c) {
  destination *d = state;
  size_t bytes = type_bytes[c->header->type];
  if (rank == (int)c->header->root)
    memcpy(d->to, c->data + c->header->parts[g->rank] * bytes, d->each * bytes);
  return 0;
}

EXPORT int HcclAllGather(void *from, void *to, uint64_t n, int type, group *g, void *stream) {
  header h;
  destination d = {.to = to, .each = n};
  int status = checked(&h, "all_gather", n, type, 0, 0);
  if (status != 0) return status;
  whole(&h, n);
  return exchange(g, &h, from, take_whole, &d);
}

EXPORT int HcclAllGatherV(void *from, uint64_t n, void *to, const uint64_t *counts, const uint64_t *starts, int type,
                          group *g, void *stream) {
  header h;
  destination d = {.to = to, .starts = starts, .counts = counts};
  int status = checked(&h, "all_gather_v", 0, type, 0, 0);
  if (status != 0) return status;
  whole(&h, n);
  return exchange(g, &h, from, take_whole, &d);
}

EXPORT int HcclBroadcast(void *data, uint64_t n, int type, uint32_t root, group *g, void *stream) {
  header h;
  destination d = {.to = data, .each = (int)root == g->rank ? 0 : n};
  int status = checked(&h, "broadcast", n, type, 0, root);
  if (status != 0) return status;
  if ((int)root == g->rank) whole(&h, n);
  return exchange(g, &h, data, take_root, &d);
}

EXPORT int HcclScatter(void *from, void *to, uint64_t n, int type, uint32_t root, group *g, void *stream) {
  header h;
  destination d = {.to = to, .each = n};
  int status = checked(&h, "scatter", n, type, 0, root);
  if (status != 0) return status;
  if ((int)root == g->rank) divide(&h, g, NULL, n);
  return exchange(g, &h, from, take_root, &d);
}

EXPORT int HcclAlltoAll(const void *from, uint64_t n, int type, const void *to, uint64_t taken, int taken_type,
                        group *g, void *stream) {
  header h;
  destination d = {.to = (char *)to, .each = taken};
  int status = checked(&h, "all_to_all", n, type, 0, 0);
  if (status != 0) return status;
  if (type != taken_type) return failure(WRONG_ARGUMENT, "all_to_all of two data types");
  divide(&h, g, NULL, n);
  return exchange(g, &h, from, take_part, &d);
}

/* Copy the parts of a list behind one another. */
static char *packed(const char *from, const uint64_t *starts, const header *h, int ranks) {
  size_t bytes = type_bytes[h->type];
  char *data = malloc(h->parts[MOST_RANKS] * bytes + 1);
  for (int rank = 0; rank < ranks; rank++)
    memcpy(data + h->parts[rank] * bytes, from + starts[rank] * bytes, (h->parts[rank + 1] - h->parts[rank]) * bytes);
  return data;
}

EXPORT int HcclAlltoAllV(const void *from, const uint64_t *counts, const uint64_t *starts, int type, const void *to,
                         const uint64_t *taken, const uint64_t *taken_starts, int taken_type, group *g, void *stream) {
  header h;
  destination d = {.to = (char *)to, .starts = taken_starts, .counts = taken};
  int status = checked(&h, "all_to_all_v", 0, type, 0, 0);
  if (status != 0) return status;
  if (type != taken_type) return failure(WRONG_ARGUMENT, "all_to_all_v of two data types");
  divide(&h, g, counts, 0);
  char *data = packed(from, starts, &h, g->size);
  status = exchange(g, &h, data, take_part, &d);
  free(data);
  return status;
}

EXPORT int HcclBarrier(group *g, void *stream) {
  header h;
  checked(&h, "barrier", 0, INT8, 0, 0);
  return exchange(g, &h, NULL, NULL, NULL);
}

/* ---- between two ranks; what is sent waits for its receiver, who removes it ---- */

EXPORT int HcclSend(void *from, uint64_t n, int type, uint32_t to, group *g, void *stream) {
  char path[PATH_MAX];
  header h;
  int status = checked(&h, "send", n, type, 0, 0);
  if ((int)to >= g->size) return failure(WRONG_ARGUMENT, "send to rank %u of %d", to, g->size);
  if (status == 0) status = path_of(path, g, "pair", g->sent[to]++, g->rank, to);
  if (status != 0) return status;
  whole(&h, n);
  return publish(path, &h, from);
}

EXPORT int HcclRecv(void *to, uint64_t n, int type, uint32_t from, group *g, void *stream) {
  char path[PATH_MAX];
  header h;
  contribution sent;
  int status = checked(&h, "send", n, type, 0, 0);
  if ((int)from >= g->size) return failure(WRONG_ARGUMENT, "receive from rank %u of %d", from, g->size);
  if (status == 0) status = path_of(path, g, "pair", g->received[from]++, from, g->rank);
  if (status == 0) status = await(path, &sent, g, from, h.operation);
  if (status != 0) return status;
  status = agrees(g, from, &h, sent.header);
  if (status == 0) memcpy(to, sent.data, n * type_bytes[type]);
  release(&sent);
  unlink(path);
  return status;
}

enum { IS_SEND = 0 };
typedef struct { int kind; void *data; uint64_t count; int type; uint32_t peer; } transfer;

EXPORT int HcclBatchSendRecv(transfer *transfers, uint32_t n, group *g, void *stream) {
  int status = 0;
  for (transfer *t = transfers; status == 0 && t < transfers + n; t++)
    if (t->kind == IS_SEND) status = HcclSend(t->data, t->count, t->type, t->peer, g, stream);
  for (transfer *t = transfers; status == 0 && t < transfers + n; t++)
    if (t->kind != IS_SEND) status = HcclRecv(t->data, t->count, t->type, t->peer, g, stream);
  return status;
}

EXPORT int HcclGroupStart(void) { return 0; }
EXPORT int HcclGroupEnd(void) { return 0; }

/* ---- groups ---- */

/* What torch-npu asks of a group, where it asks for something. Its other fields are not looked at. */
typedef struct { char unused[24]; uint32_t buffer_mib, deterministic; char names[NAME_BYTES], title[NAME_BYTES]; } options;

/* Write down, for tests, what a rank has asked for. */
static int note(const group *g, const options *o) {
  char path[PATH_MAX], line[2 * NAME_BYTES + 200];
  const char *scratch = getenv("SIMULATED_NPU_SCRATCH");
  if (o == NULL || scratch == NULL) return 0;
  snprintf(path, sizeof path, "%s/groups.jsonl", scratch);
  int length = snprintf(line, sizeof line,
                        "{\"pid\": %d, \"rank\": %d, \"size\": %d, \"title\": \"%.*s\", \"buffer_mib\": %u}\n", getpid(),
                        g->rank, g->size, NAME_BYTES - 1, o->title, o->buffer_mib);
  int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  int written = file >= 0 && write(file, line, length) == length;
  if (file >= 0) close(file);
  return written ? 0 : failure(SYSTEM_CALL, "cannot write %s", path);
}

static int join(uint32_t size, const char *name, uint32_t rank, const options *asked, group **made) {
  header h;
  if (size > MOST_RANKS || rank >= size) return failure(WRONG_ARGUMENT, "rank %u of %u", rank, size);
  group *g = calloc(1, sizeof *g);
  snprintf(g->name, sizeof g->name, "%s", name);
  g->size = size;
  g->rank = rank;
  *made = g;
  int status = note(g, asked);
  if (status != 0) return status;
  checked(&h, "join", size, INT8, 0, 0);
  return exchange(g, &h, NULL, NULL, NULL); /* as HCCL does, wait until all are there */
}

EXPORT int HcclGetRootInfo(char *info) {
  static int made;
  memset(info, 0, ROOT_INFO_BYTES);
  snprintf(info, NAME_BYTES, "group-%d-%d-%lx", getpid(), __sync_fetch_and_add(&made, 1), (long)(seconds() * 1e6));
  return 0;
}

EXPORT int HcclCommInitRootInfo(uint32_t size, const char *info, uint32_t rank, group **made) {
  return join(size, info, rank, NULL, made);
}

EXPORT int HcclCommInitRootInfoConfig(uint32_t size, const char *info, uint32_t rank, const options *config,
                                      group **made) {
  return join(size, info, rank, config, made);
}

/* Count the groups of one name that this process has made: a later one must not find the files of an earlier. */
static unsigned made_before(const char *name) {
  static struct made { struct made *next; unsigned times; char name[NAME_BYTES]; } *all;
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&lock);
  struct made *each = all;
  while (each != NULL && strcmp(each->name, name) != 0) each = each->next;
  if (each == NULL) {
    each = calloc(1, sizeof *each);
    strcpy(each->name, name);
    each->next = all;
    all = each;
  }
  unsigned times = each->times++;
  pthread_mutex_unlock(&lock);
  return times;
}

/* Ranks of the parent that are no members call this as well, with a number that means none. */
EXPORT int HcclCreateSubCommConfig(group **parent, uint32_t size, uint32_t *ranks, uint64_t id, uint32_t rank,
                                   const options *config, group **made) {
  char name[NAME_BYTES];
  *made = NULL;
  if (ranks == NULL || (int32_t)id == NO_GROUP) return 0;
  int length = snprintf(name, sizeof name, "%s-%lx", (*parent)->name, (unsigned long)id);
  if (length + 12 >= (int)sizeof name) return failure(NOT_SUPPORTED, "groups of groups this deep");
  snprintf(name + length, sizeof name - length, "-%u", made_before(name));
  return join(size, name, rank, config, made);
}

/* The last contribution stays for those who still read it; the launcher removes it. */
EXPORT int HcclCommDestroy(group *g) { free(g); return 0; }
EXPORT int HcclGetCommName(group *g, char *name) { strcpy(name, g->name); return 0; }
EXPORT int HcclGetRankSize(group *g, uint32_t *size) { *size = g->size; return 0; }
EXPORT int HcclGetRankId(group *g, uint32_t *rank) { *rank = g->rank; return 0; }
EXPORT int HcclGetCommAsyncError(group *g, int *error) { *error = 0; return 0; }
EXPORT uint32_t HcclGetCommConfigCapability(void) { return 0; }
EXPORT int HcclSetConfig(int key, int value) { return 0; }

EXPORT const char *HcclGetErrorString(int code) {
  return code == WRONG_ARGUMENT  ? "simulated HCCL: wrong argument"
         : code == NOT_SUPPORTED ? "simulated HCCL: not supported"
         : code == TIMED_OUT     ? "simulated HCCL: timed out"
                                 : "simulated HCCL: system call failed";
}
