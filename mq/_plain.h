/* The encoder of plain data in _speed.c, for _repeated.c to put tensors among it. */

#include <Python.h>

#include <stddef.h>
#include <stdint.h>

#define LARGE (64 * 1024) /* mq.extensions.LARGE */

struct Parts;

/* What has been encoded. `parts`, if there are any, are the tensors among the data. */
typedef struct {
    unsigned char *bytes;
    size_t size, room;
    struct Parts *parts;
    unsigned char first[1024];
} Buffer;

struct Tensors;

/* What is being decoded. `tensors`, if there are any, are what its extensions stand for. */
typedef struct {
    const unsigned char *at, *end;
    struct Tensors *tensors;
} Source;

#pragma GCC visibility push(hidden)
/* NULL, perhaps with an exception: it is malformed, or of a kind left to the twin. */
PyObject *take_value(Source *in, int levels, int is_key);
/* What an extension of so many bytes stands for. */
PyObject *take_described(Source *in, uint64_t size);
int grow(Buffer *out, size_t more);
/* -1 without an exception: it is of a kind left to the twin. `levels` are around it. */
int put_value(Buffer *out, PyObject *value, int levels);
/* The same of what is no plain data. */
int put_described(Buffer *out, PyObject *value);
#pragma GCC visibility pop

static inline void
begin(Buffer *out, size_t size)
{
    out->bytes = out->first;
    out->room = sizeof out->first;
    out->size = size;
    out->parts = NULL;
}

static inline void
end(Buffer *out)
{
    if (out->bytes != out->first)
        PyMem_Free(out->bytes);
}

static inline unsigned char *
extend(Buffer *out, size_t more)
{
    if (out->size + more > out->room && grow(out, more) < 0)
        return NULL;
    unsigned char *place = out->bytes + out->size;
    out->size += more;
    return place;
}
